"""The selection of the trial states to keep, and of the state a trial resumes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from orchestray.search.checkpoints.state_files import StateFiles, StatePlace

if TYPE_CHECKING:
    from orchestray.search.engine.session import MethodSession

_KEPT_BEST = 3
"""Number of successfully ended trials whose best states are kept."""


@dataclass(frozen=True)
class BestCheckpoint:
    """A state in a file that may become the best of the search."""

    score: float
    trial: int
    step: int
    report: int
    changes: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Hyper-parameters of the trial at that report."""
    violation: float = 0.0
    """Sum of the bounds that it breaks; 0 if it is feasible."""
    is_lost: bool = field(default=False, compare=False)
    """True if its file is gone or damaged, and training the trial again reproduces it."""

    @property
    def rank(self) -> tuple[float, float, int, int]:
        """Sort key: the best has the smallest, feasible before infeasible; of equals, that of the earlier trial."""
        return (self.violation, -self.score, self.trial, self.step)


class States:
    """The locations of the states of a search's trials, by the reports for which they were made."""

    def __init__(self, session: MethodSession, files: StateFiles) -> None:
        """Take over what the journal and the files hold of an earlier attempt.

        Args:
            session: conversation with the method, which knows the progress of each trial.
            files: files of the states that outlive their processes.
        """
        self.files = files
        self._session = session
        self._places: dict[tuple[int, int], StatePlace] = {}
        """Maps (trial, report) to the location of the state, for the last two reports of each trial."""
        self._old: dict[int, set[int]] = {}
        """Maps a trial to the reports before its last whose files may exist."""
        self._kept: dict[int, BestCheckpoint] = {}
        """Maps a trial to its best state: every running trial (as it may yet fail), and the best few that ended well.
        """
        self._without_file: BestCheckpoint | None = None
        """Best of the trials that ended well in an earlier attempt and have no file, like all but a few. It is the best
        of all only if the files of those few are lost.
        """
        for trial, standing in session.trials.items():
            report = standing.best_report
            if standing.score is not None and report is not None:
                changes = dict(standing.best_changes)
                step = standing.best_step or 0
                self._found(BestCheckpoint(standing.score, trial, step, report, changes, standing.violation))
            if self.are_exact:
                self._old[trial] = {report for report in files.reports(trial) if report < standing.num_reports}
                self._forget_old(trial)

    def _found(self, kept: BestCheckpoint) -> None:
        """Take over a state of an earlier attempt, if its file exists."""
        end = self._session.trials[kept.trial].ended
        if self.files.is_whole(kept.trial, kept.report, is_best=True):
            self.keep(kept)
        elif end is not None and end.status != "failed" and not self.are_exact:
            best = [] if self._without_file is None else [self._without_file]
            self._without_file = min([*best, replace(kept, is_lost=True)], key=lambda one: one.rank)

    @property
    def are_exact(self) -> bool:
        """True if a trial must resume from exactly the state of its last report."""
        return self._session.method.hands_on

    def source_of(self, trial: int) -> StatePlace | None:
        """Return the location of the state a trial resumes from; None: it starts from scratch.

        Where no trial takes over the state of another, any of its own states leads to the same result. If trials
        do, it must be the state of its last report, or one between that and the next: the next report is then the same.
        """
        standing = self._session.trials[trial]
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
        """Return the location of a state: in a process, or in its file."""
        return self._places.get(at) or StatePlace(*at)

    def lies(self, place: StatePlace | None, at: tuple[int, int]) -> None:
        """Record where a trial's state is, once its last report is in the journal.

        Earlier states are dropped, unless other trials are about to take them over.
        """
        trial, report = at
        if place is not None:
            self._places[at] = place
        self._places.pop((trial, report - 2), None)
        if self.are_exact:
            self._old.setdefault(trial, set()).add(report - 1)
            self._forget_old(trial)

    def _forget_old(self, trial: int) -> None:
        wanted = {standing.origin for standing in map(self._session.trials.__getitem__, self._session.live)}
        for report in [report for report in self._old.get(trial, ()) if (trial, report) not in wanted]:
            self.files.path(trial, report).unlink(missing_ok=True)
            self._old[trial].discard(report)

    def lost(self, trial: int) -> None:
        """Forget the state of a trial whose process is gone."""
        self._places.pop((trial, self._session.trials[trial].num_reports), None)

    def ended(self, trial: int) -> None:
        """Drop the last state of an ended trial, unless trials take over the states of others."""
        self._forget_worse()
        if (kept := self._kept.get(trial)) is not None:
            self.files.secure_best(trial, kept.report)
        if not self.are_exact:
            self.files.remove(trial)
            self.lost(trial)

    def bar(self, trial: int) -> float:
        """Return the score above which a state of a trial is worth a file: its own best, or that of all safe trials.

        States of other running trials do not count, since those may fail yet. Nor do infeasible ones, whatever their
        score.
        """
        sure, own = self._sure(), self._kept.get(trial)
        bars = [*sure[_KEPT_BEST - 1 : _KEPT_BEST], *([] if own is None else [own])]
        return max((one.score for one in bars if not one.violation), default=float("-inf"))

    def keep(self, kept: BestCheckpoint) -> None:
        """Keep a state if it may become the best; remove the files it supersedes, including the trial's own earlier
        one.
        """
        before = self._kept.get(kept.trial)
        if before is not None and before != kept:
            worse = max(before, kept, key=lambda one: one.rank)
            self.files.remove_best(worse.trial, worse.report)
            kept = min(before, kept, key=lambda one: one.rank)
        self._kept[kept.trial] = kept
        self._forget_worse()

    def keeps(self, trial: int) -> bool:
        """Return True if the best state of a trial is kept."""
        return trial in self._kept

    def clear(self, kept: BestCheckpoint | None) -> None:
        """Remove the files of a finished search, except what it needs if it is continued with more trials.

        Args:
            kept: the best state.
        """
        trials = self._session.trials
        parents = [at for parent in self._session.method.parents() if (at := trials[parent].at) is not None]
        self.files.clear(keep=None if kept is None else (kept.trial, kept.report), parents=parents)

    def best(self) -> BestCheckpoint | None:
        """Return the best state that has a file or can be reproduced; None if no trial has succeeded."""
        without_file = [] if self._without_file is None else [self._without_file]
        return min([*self._kept.values(), *without_file], key=lambda one: one.rank, default=None)

    def _sure(self) -> list[BestCheckpoint]:
        """Return the states of the trials that have ended well, the best first."""
        sure = [one for one in self._kept.values() if self._session.trials[one.trial].ended is not None]
        return sorted(sure, key=lambda one: one.rank)

    def _forget_worse(self) -> None:
        """Remove the states of failed trials, and those that can no longer be among the best few."""
        ends = {trial: self._session.trials[trial].ended for trial in self._kept}
        for trial, end in ends.items():
            if end is not None and end.status == "failed":
                self._forget(trial)
        for one in self._sure()[_KEPT_BEST:]:
            self._forget(one.trial)

    def _forget(self, trial: int) -> None:
        self.files.remove_best(trial, self._kept.pop(trial).report)
