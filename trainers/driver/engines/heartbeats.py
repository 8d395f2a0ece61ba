"""The workers of Ray Train as their heartbeats show them: who is silent, who is stuck, and who waits."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestray.platform.actors.placement import Shape
from orchestray.platform.actors.slot import SILENT_S, State

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from orchestray.platform.actors.slot import Patience
    from orchestray.platform.process.pulse import Sign

_LONGEST_GAP_S = 1.0
"""Seconds of silence that one look counts at most: while the driver or the mailbox was held up, nobody was heard."""


@dataclass(frozen=True)
class Beat:
    """The newest heartbeat of a worker."""

    number: int
    """Number of its heartbeats so far."""
    is_built: bool
    """True if its task and model are built."""
    sign: Sign | None
    """State of its work; None: it does none."""


@dataclass
class _Worker:
    beat: Beat
    silent_s: float = 0.0
    """Seconds without a heartbeat."""


class Heartbeats:
    """The workers of the present attempt that have entered, and have not answered yet."""

    def __init__(self, num_workers: int, patience: Patience, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            num_workers: number of workers.
            patience: patience with workers that are silent or stuck.
            clock: returns seconds.
        """
        self.shape = Shape("worker", num_workers)
        self._patience, self._clock = patience, clock
        self._workers: dict[int, _Worker] = {}
        self._heard_s = clock()
        self._is_aborted = False

    def begin(self) -> None:
        """Forget all workers, as another attempt begins."""
        self._workers.clear()
        self._is_aborted = False

    def enter(self, rank: int) -> None:
        """Watch a worker from now on."""
        self._workers[rank] = _Worker(Beat(0, is_built=False, sign=None))

    def leave(self, rank: int) -> None:
        """Stop watching a worker, which has answered or is killed."""
        self._workers.pop(rank, None)

    def hear(self, beats: Mapping[int, Beat]) -> None:
        """Take in the newest heartbeat of each worker that has sent one; call this repeatedly."""
        now_s = self._clock()
        gap_s = min(_LONGEST_GAP_S, now_s - self._heard_s)
        self._heard_s = now_s
        for rank, worker in self._workers.items():
            beat = beats.get(rank, worker.beat)
            worker.silent_s = 0.0 if beat.number != worker.beat.number else worker.silent_s + gap_s
            worker.beat = beat

    def troubles(self) -> dict[int, str]:
        """Return the reason to kill a worker, by rank, of each that is silent or stuck for too long."""
        reasons = {
            rank: self._patience.why_silent(worker.silent_s, is_built=worker.beat.is_built)
            or self._patience.why_stuck(worker.beat.sign)
            for rank, worker in self._workers.items()
        }
        return {rank: reason for rank, reason in reasons.items() if reason is not None}

    def is_newly_deadlocked(self) -> bool:
        """Return True, once in an attempt, when all workers at work have waited too long: for each other."""
        signs = [worker.beat.sign for worker in self._workers.values() if worker.beat.sign is not None]
        if self._is_aborted or not signs:
            return False
        self._is_aborted = all(sign.is_waiting and self._patience.is_over(sign) for sign in signs)
        return self._is_aborted

    def states(self, _now_s: float) -> list[State | None]:
        """Return the state of each worker, by rank; None for one that is not watched."""
        return [_state(self._workers.get(rank)) for rank in range(self.shape.size)]


def _state(worker: _Worker | None) -> State | None:
    if worker is None:
        return None
    if worker.silent_s >= SILENT_S:
        return State("silent", worker.silent_s)
    sign = worker.beat.sign
    if sign is None:
        return State("idle" if worker.beat.is_built else "building", worker.silent_s)
    return State("waiting" if sign.is_waiting else "working", sign.quiet_s)
