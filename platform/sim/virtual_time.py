"""A clock that jumps from event to event, and runs the replicas that use it."""

from __future__ import annotations

import heapq
import inspect
import math
from collections import deque
from collections.abc import Callable
from typing import Any

from orchestray.platform.sim.programs import Due, GeneratorReplica, SimulatedProgram, ThreadReplica, VirtualHandle, Wait


class Clock:
    """A clock with its future events. Events of one time happen in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._ready: deque[tuple[SimulatedProgram, BaseException | None]] = deque()
        self._replicas: list[SimulatedProgram] = []
        self._num_alive = 0
        self._moving: SimulatedProgram | None = None

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Schedule `action` for that time, or for now if it is past."""
        heapq.heappush(self._events, (max(time_s, self.now_s), self._num_events, action))
        self._num_events += 1

    def sleep(self, duration_s: float) -> VirtualHandle[None]:
        """Return a handle that is done after `duration_s` of virtual time, such as the time of a computation."""
        return VirtualHandle(Due(self, self.now_s + duration_s), "a replica slept", math.inf, self)

    def start(self, name: str, program: Callable[[], Any]) -> SimulatedProgram:
        """Start a replica now: `program` is a generator function, or a function that is run in a thread."""
        replica: SimulatedProgram
        if inspect.isgeneratorfunction(program):
            replica = GeneratorReplica(name, self, program())
        else:
            replica = ThreadReplica(name, self, program)
        self._replicas.append(replica)
        self._num_alive += 1
        replica.on_end(self._count_end)
        self.resume(replica, None)
        return replica

    def resume(self, replica: SimulatedProgram, error: BaseException | None) -> None:
        """Queue the replica's turn after those that are already ready."""
        replica.resumed()
        self._ready.append((replica, error))

    def block(self, wait: Wait) -> None:
        """Wait in virtual time; called by the running replica, in its thread."""
        moving = self._moving
        if not isinstance(moving, ThreadReplica):
            raise RuntimeError(  # noqa: TRY004 - it is called in the wrong place, not with a wrong type
                "a generator yields its handles, and outside a replica nothing waits: hand the function to start()"
            )
        moving.park(wait)

    def run(self) -> float:
        """Run until every replica has ended, and return the time; then raise the first error of a replica.

        Replicas that would wait for ever, because no event is scheduled any more, get ChannelTimeoutError.
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
                self._end_waits([r for r in self._replicas if r.waits])
        failed = next((r.error for r in self._replicas if r.error is not None), None)
        if failed is not None:
            raise failed
        return max((r.finished_s for r in self._replicas if r.finished_s is not None), default=self.now_s)

    def _end_waits(self, waiting: list[SimulatedProgram]) -> None:
        """End the waits of replicas that would wait for ever."""
        for replica in waiting:
            replica.time_out(None, "nothing is under way any more, so it would wait for ever")

    def _count_end(self, _: SimulatedProgram) -> None:
        self._num_alive -= 1
