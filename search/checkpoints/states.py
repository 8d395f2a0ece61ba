"""The selection of the trial states to keep, and of the state a trial resumes from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from orchestray.search.checkpoints.state_files import StateAt, StateFiles

if TYPE_CHECKING:
    from orchestray.search.engine.session import MethodSession

_KEPT_BEST = 3
"""Number of successfully ended trials whose best states are kept."""
_BY_RANK = attrgetter("rank")


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
    def at(self) -> StateAt:
        """Name of the state."""
        return StateAt(self.trial, self.report)

    @property
    def rank(self) -> tuple[float, float, int, int]:
        """Sort key: the best has the smallest, feasible before infeasible; of equals, that of the earlier trial."""
        return (self.violation, -self.score, self.trial, self.step)


class States:
    """The files with the states of a search's trials, and those of them that are needed."""

    def __init__(self, session: MethodSession, files: StateFiles) -> None:
        """Take over what the journal and the files hold of an earlier attempt.

        Args:
            session: conversation with the method, which knows the progress of each trial.
            files: files of the states.
        """
        self.files = files
        self._session = session
        self.are_exact = session.method.hands_on
        """True if a trial must resume from exactly the state of its last report."""
        self._reports = files.reports()
        """Reports of whose states there are files, by trial."""
        self._kept: dict[int, BestCheckpoint] = {}
        """Best state of each trial that runs (it may yet fail), and of the best few that ended well."""
        self._sure: list[BestCheckpoint] = []
        """Those of the trials that ended well, the best first."""
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
        copied = self._copied()
        for trial in list(self._reports):
            self._tidy(trial, copied)

    def _found(self, kept: BestCheckpoint) -> None:
        """Take over a state of an earlier attempt, if its file exists."""
        end = self._session.trials[kept.trial].ended
        if end is not None and end.status == "failed":
            return
        if self.files.is_whole(kept.at):
            self._kept[kept.trial] = kept
            if end is not None:
                self._is_sure(kept.trial)
        elif end is not None and not self.are_exact:
            best = [] if self._without_file is None else [self._without_file]
            self._without_file = min([*best, replace(kept, is_lost=True)], key=_BY_RANK)

    def source_of(self, trial: int) -> StateAt | None:
        """Return the state a trial resumes from; None: it starts from scratch.

        Where no trial takes over the state of another, any of its own states leads to the same result. If trials
        do, it must be the state of its last report, or one between that and the next: the next report is then the same.
        """
        standing = self._session.trials[trial]
        way = self.files.on_the_way(trial)
        if way is not None and way.report == standing.num_reports + 1:
            return way
        if self.are_exact:
            return None if standing.at is None else StateAt(*standing.at)
        reports = sorted(self._reports.get(trial, ()), reverse=True)
        last = next((at for report in reports if self.files.is_whole(at := StateAt(trial, report))), None)
        if way is not None and (last is None or way.report > last.report):  # of equals, the way lies before the report
            return way
        return last

    def reported(self, trial: int, *, is_written: bool) -> None:
        """Record that a trial's last report is in the journal, and drop earlier states that are not needed.

        Args:
            trial: number of the trial.
            is_written: True if there is a file of the state of that report.
        """
        if is_written:
            self._reports.setdefault(trial, set()).add(self._session.trials[trial].num_reports)
        self._tidy(trial)

    def ended(self, trial: int) -> None:
        """Drop what is not needed of an ended trial: its last state is where trials take over the states of others."""
        end = self._session.trials[trial].ended
        if end is not None and end.status == "failed":
            self._kept.pop(trial, None)
        elif trial in self._kept:
            self._is_sure(trial)
        self.files.remove(StateAt(trial, 0, is_on_the_way=True))
        self._tidy(trial)

    def _is_sure(self, trial: int) -> None:
        """Take a trial that has ended well among the best few, if it is one."""
        self._sure = sorted([*self._sure, self._kept[trial]], key=_BY_RANK)
        for one in self._sure[_KEPT_BEST:]:
            del self._kept[one.trial]
            self._tidy(one.trial)
        del self._sure[_KEPT_BEST:]
        if trial in self._kept:
            self.files.secure(self._kept[trial].at)

    def bar(self, trial: int) -> float:
        """Return the score above which a state of a trial is worth a file: its own best, or that of all safe trials.

        States of other running trials do not count, since those may fail yet. Nor do infeasible ones, whatever their
        score.
        """
        own = self._kept.get(trial)
        bars = [*self._sure[_KEPT_BEST - 1 :], *([] if own is None else [own])]
        return max((one.score for one in bars if not one.violation), default=float("-inf"))

    def keep(self, kept: BestCheckpoint) -> None:
        """Keep a state of a running trial if it may become the best, instead of the trial's own before it."""
        if kept.score >= self.bar(kept.trial):
            before = self._kept.get(kept.trial, kept)
            self._kept[kept.trial] = min(before, kept, key=_BY_RANK)
            self._tidy(kept.trial)

    def keeps(self, trial: int) -> bool:
        """Return True if the best state of a trial is kept."""
        return trial in self._kept

    def clear(self, kept: BestCheckpoint | None) -> None:
        """Remove the files of a finished search, except what it needs if it is continued with more trials.

        Args:
            kept: the best state.
        """
        trials = self._session.trials
        parents = [StateAt(*at) for parent in self._session.method.parents() if (at := trials[parent].at) is not None]
        self.files.clear([*parents, *([] if kept is None else [kept.at])])

    def best(self) -> BestCheckpoint | None:
        """Return the best state that has a file or can be reproduced; None if no trial has succeeded."""
        without_file = [] if self._without_file is None else [self._without_file]
        return min([*self._kept.values(), *without_file], key=_BY_RANK, default=None)

    def _copied(self) -> Collection[tuple[int, int]]:
        """Return the states of others that trials are about to take over."""
        if not self.are_exact:
            return ()
        standings = [self._session.trials[trial] for trial in self._session.live]
        return {standing.origin for standing in standings if standing.origin is not None}

    def _tidy(self, trial: int, copied: Collection[tuple[int, int]] | None = None) -> None:
        """Remove the files of a trial's states that are not needed: neither by it, nor by others, nor as the best."""
        reports, standing = self._reports.get(trial), self._session.trials.get(trial)
        if reports is None:
            return
        needed = set()
        if standing is not None and (standing.ended is None or self.are_exact):
            needed.add(max((report for report in reports if report <= standing.num_reports), default=0))
        if (kept := self._kept.get(trial)) is not None:
            needed.add(kept.report)
        if reports <= needed:
            return
        copied = self._copied() if copied is None else copied
        for report in [report for report in reports - needed if (trial, report) not in copied]:
            self.files.remove(StateAt(trial, report))
            reports.discard(report)
        if not reports:
            del self._reports[trial]
