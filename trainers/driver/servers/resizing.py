"""The change of the number of workers in a run under parameter servers, while the other workers go on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import OrchestrayError

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestray.platform.actors.gang import Gang
    from orchestray.trainers.driver.control.scaling import Scaling
    from orchestray.trainers.driver.runlog.run_log import RunProgress

_LEAVE_TIMEOUT_S = 30.0
"""Seconds that a worker that leaves may go on computing; nothing waits for it."""


class Resizing:
    """The gang of workers as it grows and shrinks, and what the lead has to know of it.

    Attributes:
        departed: usage of the workers that have left.
    """

    def __init__(
        self,
        workers: Gang,
        scaling: Scaling,
        run_progress: RunProgress,
        *,
        cut: Callable[[int], None],
        expel: Callable[[int], None],
        dismiss: Callable[[int], None] | None = None,
        size: int = 1,
    ) -> None:
        """
        Args:
            workers: gang of the workers.
            scaling: makes the changes of the gang, and answers requests.
            run_progress: has the present step of the run.
            cut: has the lead cut later batches for a number of replicas.
            expel: reports to the lead that a replica is gone for good; a dead lead ignores it.
            dismiss: has the lead order a replica to leave once it has handed over its compressors' state; None: they
                have none.
            size: number of workers of a replica, whose ranks follow each other.
        """
        self.departed: list[dict[str, Any]] = []
        self._workers = workers
        self._scaling = scaling
        self._run_progress = run_progress
        self._cut, self._expel, self._dismiss, self._size = cut, expel, dismiss, size
        self._num_replicas: int | None = None
        """Number of replicas into whose shares the lead is to cut batches; None: the number at the start."""
        self._leave_by_s = 0.0
        self._gone: set[int] = set()
        """Replicas that have left and were not replaced since."""

    @property
    def is_late(self) -> bool:
        """True if the workers that were dismissed have had their time."""
        return time.monotonic() > self._leave_by_s

    def tell_lead(self) -> None:
        """Report the number of replicas, and those that have left, to a lead that started or took over since."""
        if self._num_replicas is None:
            return
        self._cut(self._num_replicas)
        for replica in sorted(self._gone):
            self._expel(replica)

    def dismiss(self, num_workers: int) -> None:
        """Have the workers from this rank on leave."""
        there = len(self._workers.slots)
        self._leave_by_s = time.monotonic() + _LEAVE_TIMEOUT_S
        self._have_cut(num_workers // self._size)
        if self._dismiss is not None:
            for replica in range(num_workers // self._size, there // self._size):
                self._dismiss(replica)
            return
        for rank in range(num_workers, there):  # its connections end, and the lead hands out again what it has not done
            self._workers.control_one(rank, "leave")

    def depart(self, rank: int) -> None:
        """Keep the usage of a worker that leaves and has answered."""
        try:
            used = self._workers.gather_one(self._workers.control_one(rank, "usage"), rank)
        except OrchestrayError:
            return  # it died on its way out
        self.departed.append({**used, "left_at_step": self._run_progress.last_step})

    def resize(self, num_workers: int) -> None:
        """Take on the workers that were started, or end the processes of those that have left."""
        before, after = len(self._workers.slots) // self._size, num_workers // self._size
        self._gone -= set(range(before, after))
        self._gone |= set(range(after, before))
        for replica in range(after, before):
            self._expel(replica)  # for a lead that took over meanwhile; the earlier one knew it
        self._scaling.resize()
        self._have_cut(after)
        self._scaling.done(self._run_progress.last_step)

    def _have_cut(self, num_replicas: int) -> None:
        if num_replicas != self._num_replicas:
            self._num_replicas = num_replicas
            self._cut(num_replicas)
