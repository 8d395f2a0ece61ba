"""A clock that jumps from event to event, and moves the replicas that live by it."""

from __future__ import annotations

import heapq
import inspect
import math
from collections import deque
from collections.abc import Callable
from typing import Any

from orchestray.platform.channel.replicas import Due, GeneratorReplica, Replica, ThreadReplica, VirtualHandle, Wait


class Clock:
    """The events to come. Events of one time happen in the order they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._ready: deque[tuple[Replica, BaseException | None]] = deque()
        self._replicas: list[Replica] = []
        self._num_alive = 0
        self._moving: Replica | None = None

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Does `action` at that time, or now if it is past."""
        heapq.heappush(self._events, (max(time_s, self.now_s), self._num_events, action))
        self._num_events += 1

    def sleep(self, duration_s: float) -> VirtualHandle[None]:
        """A handle that is done after so much virtual time: what computing costs."""
        return VirtualHandle(Due(self, self.now_s + duration_s), "a replica slept", math.inf, self)

    def start(self, name: str, program: Callable[[], Any]) -> Replica:
        """A replica that begins now: `program` is a generator function, or a function that is run in a thread."""
        replica: Replica
        if inspect.isgeneratorfunction(program):
            replica = GeneratorReplica(name, self, program())
        else:
            replica = ThreadReplica(name, self, program)
        self._replicas.append(replica)
        self._num_alive += 1
        replica.on_end(self._count_end)
        self.resume(replica, None)
        return replica

    def resume(self, replica: Replica, error: BaseException | None) -> None:
        """Its turn comes after those that are ready already."""
        replica.resumed()
        self._ready.append((replica, error))

    def block(self, wait: Wait) -> None:
        """Called by the replica that moves, in its thread."""
        moving = self._moving
        if not isinstance(moving, ThreadReplica):
            raise RuntimeError(  # noqa: TRY004 - where it is called is wrong, not what with
                "a generator yields its handles, and outside a replica nothing waits: hand the function to start()"
            )
        moving.park(wait)

    def run(self) -> float:
        """Until every replica has ended; returns the time. Raises the first error of a replica, after all have ended.

        Replicas that would wait for ever, since nothing is under way any more, get ChannelTimeoutError.
        """
        while True:
            if self._ready:
                replica, error = self._ready.popleft()
                if replica.finished_s is None:
                    self._moving = replica
                    replica.advance(error)
                    self._moving = None
            elif not self._num_alive:
                break
            elif self._events:
                self.now_s, _, action = heapq.heappop(self._events)
                action()
            else:
                for replica in [r for r in self._replicas if r.waits]:
                    replica.time_out(None, "nothing is under way any more, so it would wait for ever")
        failed = next((r.error for r in self._replicas if r.error is not None), None)
        if failed is not None:
            raise failed
        return max((r.finished_s for r in self._replicas if r.finished_s is not None), default=self.now_s)

    def _count_end(self, _: Replica) -> None:
        self._num_alive -= 1
