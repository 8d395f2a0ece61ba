"""Which states of trials are kept where, and which of them a trial goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from orchestray.search.engine.state_files import StateFiles, StatePlace

if TYPE_CHECKING:
    from orchestray.search.engine.director import Director

_KEPT_BEST = 3
"""Trials that have ended well whose best states are kept."""


@dataclass(frozen=True)
class Kept:
    """A state in a file that may become the best's."""

    score: float
    trial: int
    step: int
    report: int
    changes: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The trial's hyper-parameters then."""
    is_lost: bool = field(default=False, compare=False)
    """Whether its file is gone or damaged, and training it again leads to the same."""

    @property
    def rank(self) -> tuple[float, int, int]:
        """The smallest is the best; of equal ones the earlier trial's."""
        return (-self.score, self.trial, self.step)


class States:
    """Where the states of the trials of a search are, by the reports they were made for."""

    def __init__(self, director: Director, files: StateFiles) -> None:
        """What the journal and the files tell of an earlier attempt is taken in.

        Args:
            director: knows how the trials stand.
            files: of the states that survive their processes.
        """
        self.files = files
        self._director = director
        self._places: dict[tuple[int, int], StatePlace] = {}
        """By (trial, report): of each trial the last two."""
        self._old: dict[int, set[int]] = {}
        """Of each trial the reports before its last whose files may be there."""
        self._kept: dict[int, Kept] = {}
        """Of each trial under way its best state, as it may yet fail; of those that have ended well the best few."""
        self._without_file: Kept | None = None
        """The best of the trials that ended well in an earlier attempt and have no file, as all but a few have none: it
        is the best of all only if the files of those are lost."""
        for trial, standing in director.trials.items():
            report = standing.best_report
            if standing.score is not None and report is not None:
                changes = dict(standing.best_changes)
                self._found(Kept(standing.score, trial, standing.best_step or 0, report, changes))
            if self.are_exact:
                self._old[trial] = {report for report in files.reports(trial) if report < standing.num_reports}
                self._forget_old(trial)

    def _found(self, kept: Kept) -> None:
        """A state of an earlier attempt, whose file may be there."""
        end = self._director.trials[kept.trial].ended
        if self.files.is_whole(kept.trial, kept.report, is_best=True):
            self.keep(kept)
        elif end is not None and end.status != "failed" and not self.are_exact:
            best = [] if self._without_file is None else [self._without_file]
            self._without_file = min([*best, replace(kept, is_lost=True)], key=lambda one: one.rank)

    @property
    def are_exact(self) -> bool:
        """Whether a trial has to go on from the state of its last report, and no other."""
        return self._director.method.hands_on

    def source_of(self, trial: int) -> StatePlace | None:
        """What a trial goes on from; None: its beginning.

        Where no trial takes the state of another, whatever it was leads to the same. Else it has to be the state of its
        last report, or one on the way from there to the next, so that what it says at its next is the same, too.
        """
        standing = self._director.trials[trial]
        last = (trial, standing.num_reports)
        if self.are_exact:
            if self.files.is_on_the_way(trial, standing.num_reports + 1):
                return StatePlace(trial, standing.num_reports + 1)
            return None if standing.at is None else self.place(standing.at)
        if last in self._places:
            return self._places[last]
        reports = [report for report in self.files.reports(trial) if report <= standing.num_reports + 1]
        return StatePlace(trial, reports[-1]) if reports else None

    def place(self, at: tuple[int, int]) -> StatePlace:
        """Where a state is: with a process, or in its file."""
        return self._places.get(at) or StatePlace(*at)

    def lies(self, place: StatePlace | None, at: tuple[int, int]) -> None:
        """A trial's state lies there since its last report, which is written down: earlier ones are not needed, but by
        those who are to take them.
        """
        trial, report = at
        if place is not None:
            self._places[at] = place
        self._places.pop((trial, report - 2), None)
        if self.are_exact:
            self._old.setdefault(trial, set()).add(report - 1)
            self._forget_old(trial)

    def _forget_old(self, trial: int) -> None:
        wanted = {standing.origin for standing in map(self._director.trials.__getitem__, self._director.live)}
        for report in [report for report in self._old.get(trial, ()) if (trial, report) not in wanted]:
            self.files.path(trial, report).unlink(missing_ok=True)
            self._old[trial].discard(report)

    def lost(self, trial: int) -> None:
        """The process that held a trial's state is gone."""
        self._places.pop((trial, self._director.trials[trial].num_reports), None)

    def ended(self, trial: int) -> None:
        """A trial has ended: others may take its last state where they do that, else nobody will."""
        self._forget_worse()
        if (kept := self._kept.get(trial)) is not None:
            self.files.secure_best(trial, kept.report)
        if not self.are_exact:
            self.files.remove(trial)
            self.lost(trial)

    def bar(self, trial: int) -> float:
        """The score from which on a state of a trial is worth a file: better than its own, or than all that are sure.

        What others under way have come to says nothing, since they may fail yet.
        """
        sure, own = self._sure(), self._kept.get(trial)
        of_all = sure[-1].score if len(sure) >= _KEPT_BEST else float("-inf")
        return max(of_all, float("-inf") if own is None else own.score)

    def keep(self, kept: Kept) -> None:
        """Keep a state if it may become the best; the files of others go, a trial's own earlier one among them."""
        before = self._kept.get(kept.trial)
        if before is not None and before != kept:
            worse = max(before, kept, key=lambda one: one.rank)
            self.files.remove_best(worse.trial, worse.report)
            kept = min(before, kept, key=lambda one: one.rank)
        self._kept[kept.trial] = kept
        self._forget_worse()

    def clear(self, kept: Kept | None) -> None:
        """The search is over: only what it needs if it is given more trials stays in files.

        Args:
            kept: the best.
        """
        trials = self._director.trials
        parents = [at for parent in self._director.method.parents() if (at := trials[parent].at) is not None]
        self.files.clear(keep=None if kept is None else (kept.trial, kept.report), parents=parents)

    def best(self) -> Kept | None:
        """The best state that there is a file of or that can be had again; None if no trial has succeeded."""
        without_file = [] if self._without_file is None else [self._without_file]
        return min([*self._kept.values(), *without_file], key=lambda one: one.rank, default=None)

    def _sure(self) -> list[Kept]:
        """Of the trials that have ended well, the best first."""
        sure = [one for one in self._kept.values() if self._director.trials[one.trial].ended is not None]
        return sorted(sure, key=lambda one: one.rank)

    def _forget_worse(self) -> None:
        """Remove the states of trials that have failed, and those that are behind the best few for certain."""
        ends = {trial: self._director.trials[trial].ended for trial in self._kept}
        for trial, end in ends.items():
            if end is not None and end.status == "failed":
                self._forget(trial)
        for one in self._sure()[_KEPT_BEST:]:
            self._forget(one.trial)

    def _forget(self, trial: int) -> None:
        self.files.remove_best(trial, self._kept.pop(trial).report)
