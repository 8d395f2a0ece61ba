"""More workers and fewer, in a run under parameter servers: they come and go while the others go on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import OrchestrayError

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestray.platform.gang.gang import Gang
    from orchestray.trainers.driver.scaling import Scaling
    from orchestray.trainers.driver.story import Story
    from orchestray.trainers.replica.settings import ReplicaSettings

_LEAVE_TIMEOUT_S = 30.0
"""How long a worker that leaves may go on computing; nobody waits for it."""


class Resizing:
    """The gang of workers as it grows and shrinks.

    Attributes:
        num_workers: into shares for so many replicas the lead is to cut batches; None: as it was told at first.
        leaving: ranks of workers on their way out: whatever they answer, nobody takes their place.
        departed: what workers did that have left.
    """

    def __init__(
        self,
        workers: Gang,
        scaling: Scaling,
        story: Story,
        *,
        employ: Callable[[int], None],
        cut: Callable[[int], None],
        expel: Callable[[int], None],
        dismiss: Callable[[int], None] | None = None,
        size: int = 1,
    ) -> None:
        """
        Args:
            workers: the gang.
            scaling: takes requests up.
            story: says which step the run is at.
            employ: sets a replica to work.
            cut: has the lead cut later batches for so many replicas.
            expel: tells the lead that a replica is gone for good; a lead that is dead does not hear it.
            dismiss: has the lead tell a replica to leave once it has handed over what its compression keeps; None: that
                keeps nothing.
            size: workers of a replica, whose ranks follow each other.
        """
        self.num_workers: int | None = None
        self.leaving: set[int] = set()
        self.departed: list[dict[str, Any]] = []
        self._workers = workers
        self._scaling = scaling
        self._story = story
        self._employ, self._cut, self._expel, self._size = employ, cut, expel, size
        self._dismiss = dismiss
        self._leave_by_s = 0.0
        self._gone: set[int] = set()
        """Replicas that have left, and whose place nobody has taken since."""

    def tell_lead(self) -> None:
        """Say who is there, and who is not, to a lead that was started, or took over, since."""
        if self.num_workers is None:
            return
        self._cut(self.num_workers)
        for replica in sorted(self._gone):
            self._expel(replica)

    def look(self, settings: ReplicaSettings, rank_of: dict[Any, int]) -> None:
        """Take in workers that are ready, or have the last ones leave, if that was asked for. Never waits.

        Args:
            settings: the run's at first.
            rank_of: the ranks of those that work, by the references of their answers; changed.
        """
        if self.leaving:
            self.see_off(rank_of)
            return
        change = self._scaling.ready(settings)
        if change is None:
            return
        there = len(self._workers.seats)
        self.num_workers = change.after
        if change.grows:
            self._workers.adopt()
            for replica in range(there // self._size, change.after):
                self._gone.discard(replica)
                self._employ(replica)
            self._cut(change.after)
            self._scaling.done(self._story.last_step)
            return
        self._cut(change.after)
        self.leaving = set(range(change.after * self._size, there))
        self._leave_by_s = time.monotonic() + _LEAVE_TIMEOUT_S
        if self._dismiss is not None:
            for replica in range(change.after, there // self._size):
                self._dismiss(replica)
            return
        for rank in self.leaving:  # its connections end, and the ledger hands out again what it has not done
            self._workers.control_one(rank, "leave")

    def depart(self, rank: int) -> None:
        """A worker that leaves has answered: keep what it did."""
        try:
            used = self._workers.gather_one(self._workers.control_one(rank, "usage"), rank)
        except OrchestrayError:
            return  # it died on its way out
        self.departed.append({**used, "left_at_step": self._story.last_step})

    def see_off(self, rank_of: dict[Any, int]) -> None:
        """End the processes of those that leave, once none of them works any more."""
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
            self._expel(replica)  # the lead knows it already, unless the one that did was lost since
        self._workers.shrink(min(self.leaving))
        self.leaving.clear()
        self._scaling.done(self._story.last_step)
