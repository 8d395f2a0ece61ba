"""The change of the number of workers in a run under parameter servers, while the other workers go on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import OrchestrayError

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestray.platform.actors.gang import Gang
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.driver.runlog.run_log import RunProgress
    from orchestray.trainers.driver.runlog.scaling import Scaling

_LEAVE_TIMEOUT_S = 30.0
"""Seconds that a worker that leaves may go on computing; nothing waits for it."""


class Resizing:
    """The gang of workers as it grows and shrinks.

    Attributes:
        num_workers: number of replicas into whose shares the lead is to cut batches; None: the number at the start.
        leaving: ranks of workers that are leaving; they are not replaced, whatever they answer.
        departed: usage of the workers that have left.
    """

    def __init__(
        self,
        workers: Gang,
        scaling: Scaling,
        run_progress: RunProgress,
        *,
        employ: Callable[[int], None],
        cut: Callable[[int], None],
        expel: Callable[[int], None],
        dismiss: Callable[[int], None] | None = None,
        size: int = 1,
    ) -> None:
        """
        Args:
            workers: gang of the workers.
            scaling: takes requests.
            run_progress: has the present step of the run.
            employ: sets a replica to work.
            cut: has the lead cut later batches for a number of replicas.
            expel: reports to the lead that a replica is gone for good; a dead lead ignores it.
            dismiss: has the lead order a replica to leave once it has handed over its compressors' state; None: they
                have none.
            size: number of workers of a replica, whose ranks follow each other.
        """
        self.num_workers: int | None = None
        self.leaving: set[int] = set()
        self.departed: list[dict[str, Any]] = []
        self._workers = workers
        self._scaling = scaling
        self._run_progress = run_progress
        self._employ, self._cut, self._expel, self._size = employ, cut, expel, size
        self._dismiss = dismiss
        self._leave_by_s = 0.0
        self._gone: set[int] = set()
        """Replicas that have left and were not replaced since."""

    def tell_lead(self) -> None:
        """Report the number of replicas, and those that have left, to a lead that started or took over since."""
        if self.num_workers is None:
            return
        self._cut(self.num_workers)
        for replica in sorted(self._gone):
            self._expel(replica)

    def look(self, settings: ReplicaSettings, rank_of: dict[Any, int]) -> None:
        """Add workers that are ready, or have the last ones leave, if that was requested. Never waits.

        Args:
            settings: settings of the run at its start.
            rank_of: ranks of the working workers, by the references of their answers; changed.
        """
        if self.leaving:
            self.see_off(rank_of)
            return
        change = self._scaling.ready(settings)
        if change is None:
            return
        there = len(self._workers.slots)
        self.num_workers = change.after
        if change.grows:
            self._workers.adopt()
            for replica in range(there // self._size, change.after):
                self._gone.discard(replica)
                self._employ(replica)
            self._cut(change.after)
            self._scaling.done(self._run_progress.last_step)
            return
        self._cut(change.after)
        self.leaving = set(range(change.after * self._size, there))
        self._leave_by_s = time.monotonic() + _LEAVE_TIMEOUT_S
        if self._dismiss is not None:
            for replica in range(change.after, there // self._size):
                self._dismiss(replica)
            return
        for rank in self.leaving:  # its connections end, and the lead hands out again what it has not done
            self._workers.control_one(rank, "leave")

    def depart(self, rank: int) -> None:
        """Keep the usage of a worker that leaves and has answered."""
        try:
            used = self._workers.gather_one(self._workers.control_one(rank, "usage"), rank)
        except OrchestrayError:
            return  # it died on its way out
        self.departed.append({**used, "left_at_step": self._run_progress.last_step})

    def see_off(self, rank_of: dict[Any, int]) -> None:
        """End the processes of the leaving workers, once none of them works any more."""
        if not self.leaving:
            return
        late = [reference for reference, rank in rank_of.items() if rank in self.leaving]
        if late and time.monotonic() < self._leave_by_s:
            return
        for reference in late:
            del rank_of[reference]
        replicas = {rank // self._size for rank in self.leaving}
        self._gone |= replicas
        for replica in sorted(replicas):
            self._expel(replica)  # for a lead that took over meanwhile; the earlier one knew it
        self._workers.shrink(min(self.leaving))
        self.leaving.clear()
        self._scaling.done(self._run_progress.last_step)
