"""Members with a GPU each beside servers that are real: threads, and channels in real time.

What a server answers one replica may depend on what others send it. So a member that waits for a server lets the other
members go on. The answer is taken once nothing else is under way in virtual time, in the order in which answers come.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any
from unittest import mock

from orchestray.platform.comm.channel.base import Handle
from orchestray.platform.sim.programs import Promise, SimulatedProgram, ThreadReplica
from orchestray.trainers.ps.protocol import messages
from support.nccl import Gpus

ANSWERED_S = 60.0
"""Seconds of real time after which an answer never comes: the server waits for a member that stands still."""


class GpusBesideServers(Gpus):
    """Members with a GPU each, which also wait for what happens in real time."""

    def __init__(self, seed: int = 0, *, room: int | None = None, answered_s: float = ANSWERED_S) -> None:
        super().__init__(seed, room=room)
        self._answered_s = answered_s
        self._num_outside = 0
        """Number of waits for something of real time."""
        self._answered: SimpleQueue[Promise[None]] = SimpleQueue()

    def wait_outside(self, future: Future[Any]) -> None:
        """Return when a future of real time is done; the other members go on if a member calls this."""
        moving = self._moving
        if future.done() or not (isinstance(moving, ThreadReplica) and moving._thread is threading.current_thread()):
            return
        promise: Promise[None] = Promise()
        self._num_outside += 1
        future.add_done_callback(lambda _: self._answered.put(promise))
        self.wait_for(promise, "the answer of a server")

    def _end_waits(self, waiting: list[SimulatedProgram]) -> None:
        if self._num_outside and self.deadlock is None:
            with contextlib.suppress(Empty):
                promise = self._answered.get(timeout=self._answered_s)
                self._num_outside -= 1
                promise.set_result(None)
                return
        super()._end_waits(waiting)


@contextlib.contextmanager
def beside_servers(gpus: GpusBesideServers) -> Iterator[None]:
    """Let members wait for their servers without holding up each other."""
    result = messages.result

    def in_turn(handle: Handle[Any]) -> Any:
        gpus.wait_outside(handle.future)
        return result(handle)

    with mock.patch.object(messages, "result", in_turn):
        yield
