"""The session with a method: every call and its answer is recorded in a journal, and replayed on resuming.

It is independent of Ray and training: trials are numbers, steps and scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, TypeVar

from orchestray.platform.errors import OrchestrayError
from orchestray.search.methods.base import (
    Continue,
    Decision,
    Exploit,
    Finished,
    Method,
    Observation,
    Pause,
    Proposal,
    Report,
    Stop,
    merit,
    violation_of,
)
from orchestray.search.methods.space import Space
from orchestray.search.registry.programs import program_name

Sections = Mapping[str, Mapping[str, Any]]
"""The sections of dimensions as plain data, by key."""
_Told = TypeVar("_Told", Report, Finished, Observation)
_LARGEST_SCORE = 1e150
"""Largest score that methods see: they square scores, and add squares up."""


class SearchError(OrchestrayError):
    """An error after which the search cannot continue; the text says why."""


class Journal(Protocol):
    """A log of the calls: `search.results.writer.Journal`, or a list in a test."""

    def append(self, call: str, **values: Any) -> None: ...

    def entries(self) -> list[dict[str, Any]]: ...


class MemoryJournal:
    """A journal in memory, which ends with its process."""

    def __init__(self, entries: Sequence[Mapping[str, Any]] = ()) -> None:
        self._entries = [dict(entry) for entry in entries]

    def append(self, call: str, **values: Any) -> None:
        self._entries.append({"call": call, **values})

    def entries(self) -> list[dict[str, Any]]:
        return list(self._entries)


@dataclass
class TrialStanding:
    """The progress of a trial."""

    proposal: Proposal
    changes: dict[str, Any]
    """Current hyper-parameters."""
    step: int = 0
    """Step of its last report, or of the state it has taken over since."""
    decision: Decision | None = None
    """Answer to its last report, not carried out yet."""
    score: float | None = None
    """Best reported score, of a feasible report if there is one."""
    best_step: int | None = None
    """Step of that report."""
    best_report: int | None = None
    """Number of that report."""
    best_changes: Mapping[str, Any] = field(default_factory=dict)
    """Hyper-parameters at that report."""
    scores: tuple[float, ...] = ()
    """Scores of all objectives at that report."""
    violations: tuple[float, ...] = ()
    """Violations of the bounds at that report."""
    ended: Finished | None = None
    is_over: bool = False
    """True if a condition of its config ended it with its last report: no decision lets it go on."""
    num_reports: int = 0
    seconds: float = 0.0
    """Seconds of work up to its last report."""
    copied: list[int] = field(default_factory=list)
    """Bytes of each state of another trial that it had taken over by its last report."""
    origin: tuple[int, int] | None = None
    """State (trial, report) of another trial that it takes over since its last report; None: its own."""
    taken: list[tuple[int, Exploit]] = field(default_factory=list)
    """Record of every exploit or change: the step, and the decision."""

    @property
    def violation(self) -> float:
        """Sum of the bounds that the best report breaks; 0 if it is feasible."""
        return violation_of(self.violations)

    @property
    def at(self) -> tuple[int, int] | None:
        """State (trial, report) that it continues from; None: from scratch."""
        trial = self.proposal.trial
        return self.origin or ((trial, self.num_reports) if self.num_reports else None)


class MethodSession:
    """A session with a method, which knows the progress of every trial."""

    def __init__(
        self, method: Method, journal: Journal, *, space_of: Callable[[Sections], Space] | None = None
    ) -> None:
        """Replay the calls of the journal.

        Args:
            method: the method, to which no call has been made yet.
            journal: calls so far.
            space_of: makes a wider space of its sections; None: the space never becomes wider.

        Raises:
            SearchError: the method's answers differ from the journal.
        """
        self.method = method
        self._space_of = space_of
        self.trials: dict[int, TrialStanding] = {}
        self._live: dict[int, None] = {}
        self.released: list[int] = []
        """Paused trials on which the method decided with the last report or end."""
        self._journal = journal
        self._news = True
        """True if the method received anything since it last had nothing to propose."""
        for number, entry in enumerate(checked_calls(journal), start=1):
            try:
                self._repeat(number, entry)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise _unreadable(number, f"{entry['call']}: {type(error).__name__}: {error}") from error

    @property
    def is_done(self) -> bool:
        """True if the method will never propose a trial again."""
        return self.method.is_done

    @property
    def live(self) -> list[int]:
        """Trials that have not ended."""
        return list(self._live)

    def budget(self, trial: int) -> int:
        """Return the total number of steps of a trial."""
        steps = self.trials[trial].proposal.steps
        return self.method.steps_per_trial if steps is None else steps

    def next_report(self, trial: int) -> int:
        """Return the step at which a trial reports next."""
        step, budget = self.trials[trial].step, self.budget(trial)
        return min(max(self.method.next_report(trial, step), min(step + 1, budget)), budget)

    # -- calls, written down -------------------------------------------------------------------------------------------

    def ask(self) -> Proposal | None:
        """Return the next trial; None if there is none now."""
        if self.is_done or not self._news:
            return None
        try:
            proposal = self.method.ask()
        except OrchestrayError:
            raise
        except Exception as error:  # of a user's own space, say
            raise SearchError(
                f"No further trial can be proposed: {type(self.method).__name__} failed with {type(error).__name__}: "
                f"{error}"
            ) from error
        self._asked(proposal)
        self._journal.append("ask", proposal=None if proposal is None else asdict(proposal))
        return proposal

    def report(self, report: Report, *, seconds: float = 0.0, copied_bytes: int = 0, is_over: bool = False) -> Decision:
        """Report a trial's progress to the method.

        Args:
            report: its progress.
            seconds: seconds of work on the trial in all; only recorded.
            copied_bytes: bytes of the state that it has taken over since its last report; only recorded.
            is_over: True if a condition of its config has ended the trial, whatever the method decides.
        """
        decision = self.method.report(_bounded(report))
        self._reported(report, decision, seconds, copied_bytes, is_over=is_over)
        given = self._release(ends_first=is_over)
        worked: dict[str, Any] = {"seconds": round(seconds, 6)}
        worked |= {"copied_bytes": copied_bytes} if copied_bytes else {}
        worked |= {"is_over": True} if is_over else {}
        self._journal.append("report", report=asdict(report), decision=_told(decision), released=given, **worked)
        return decision

    def tell(self, trial: int, status: str, *, error: str | None = None, told: Mapping[str, Any] | None = None) -> None:
        """Report the end of a trial to the method."""
        standing = self.trials[trial]
        finished = Finished(
            trial,
            status,
            standing.step,
            standing.score,
            standing.scores,
            told=dict(told or {}),
            error=error,
            violations=standing.violations,
        )
        self.method.tell(_bounded(finished))
        self._ended(finished)
        self._journal.append("tell", finished=asdict(finished), released=self._release())

    def allow(self, trials: int | None) -> None:
        """Set the total number of trials that the method may propose."""
        self._journal.append("allow", before=self.method.trials, trials=trials)
        self._allowed(trials)

    def learn(self, observations: Sequence[Observation]) -> bool:
        """Give the method trials of earlier searches, before it proposes any; return True if it learns from them.

        The journal keeps them: a search that is resumed does not read the earlier ones again.
        """
        does = self.method.learn([_bounded(one) for one in observations])
        if does:
            self._journal.append("learn", observations=[asdict(one) for one in observations])
        return does

    def widen(self, before: Sections, space: Sections) -> bool:
        """Have the method continue over a wider space; return True if it can.

        Args:
            before: sections of the dimensions so far, as plain data.
            space: those from now on.
        """
        can = self._widened(space)
        if can:
            self._journal.append("widen", before=before, space=space)
            self._news = True
        return can

    def _widened(self, sections: Sections) -> bool:
        return self._space_of is not None and self.method.widen(self._space_of(sections))

    # -- what follows from them ----------------------------------------------------------------------------------------

    def _asked(self, proposal: Proposal | None) -> None:
        self._news = proposal is not None
        if proposal is None:
            return
        if proposal.trial in self.trials:
            raise SearchError(f"The method proposed trial {proposal.trial} twice; each has a number of its own.")
        self.trials[proposal.trial] = TrialStanding(proposal, dict(proposal.changes))
        self._live[proposal.trial] = None

    def _allowed(self, trials: int | None) -> None:
        self._news = True
        self.method.allow(trials)

    def _reported(
        self, report: Report, decision: Decision, seconds: float, copied_bytes: int, *, is_over: bool
    ) -> None:
        self._news = True
        standing = self.trials[report.trial]
        standing.seconds, standing.is_over = seconds, is_over
        standing.copied += [copied_bytes] if copied_bytes else []
        standing.step, standing.decision = report.step, decision
        standing.num_reports, standing.origin = standing.num_reports + 1, None
        before = None if standing.score is None else merit(standing.score, standing.violation)
        if before is None or merit(report.score, report.violation) > before:
            standing.violations = report.violations
            standing.score, standing.best_step, standing.scores = report.score, report.step, report.scores
            standing.best_report, standing.best_changes = standing.num_reports, dict(standing.changes)
        self._follow(standing, decision)

    def _follow(self, standing: TrialStanding, decision: Decision) -> None:
        if not isinstance(decision, Exploit) or standing.is_over:  # it never trains with other values
            return
        standing.changes = dict(decision.changes)
        if decision.source != standing.proposal.trial:
            source = self.trials[decision.source]
            standing.step, standing.origin = source.step, source.at
        standing.taken.append((standing.step, decision))

    def _ended(self, finished: Finished) -> None:
        self._news = True
        self.trials[finished.trial].ended = finished
        self._live.pop(finished.trial, None)

    def _release(self, *, ends_first: bool = False) -> list[list[Any]]:
        """Ask for decisions on paused trials; return them in the journal's format.

        Args:
            ends_first: True if the trial that has reported ends with that. The others are then decided on after its
                end, so that it does not matter who reports last.
        """
        given = [] if ends_first else list(self.method.released())
        self.released = [trial for trial, _ in given]
        for trial, decision in given:
            self.trials[trial].decision = decision
            self._follow(self.trials[trial], decision)
        return [[trial, _told(decision)] for trial, decision in given]

    # -- made again ----------------------------------------------------------------------------------------------------

    def _repeat(self, number: int, entry: Mapping[str, Any]) -> None:
        call = entry["call"]
        if call == "ask":
            proposal = None if self.is_done else self.method.ask()
            self._check(number, call, _renamed(entry["proposal"]), None if proposal is None else asdict(proposal))
            self._asked(proposal)
            return
        if call == "allow":
            self._allowed(entry["trials"])
            return
        if call == "learn":
            before = [Observation(**_tuples(one, "scores", "violations")) for one in entry["observations"]]
            self.method.learn([_bounded(one) for one in before])
            return
        if call == "widen":
            self._news = self._widened(entry["space"])
            return
        if call == "report":
            report = Report(**_tuples(entry["report"], "scores", "evaluations", "violations"))
            decision, is_over = self.method.report(_bounded(report)), bool(entry.get("is_over"))
            self._check(number, call, entry["decision"], _told(decision))
            worked = entry.get("seconds", 0.0), entry.get("copied_bytes", 0)
            self._reported(report, decision, *worked, is_over=is_over)
            self._check(number, call, entry["released"], self._release(ends_first=is_over))
        else:
            finished = Finished(**_tuples(entry["finished"], "scores", "violations"))
            self.method.tell(_bounded(finished))
            self._ended(finished)
            self._check(number, call, entry["released"], self._release())

    def _check(self, number: int, call: str, before: Any, now: Any) -> None:
        if not _same(before, now):
            raise SearchError(
                f"The search cannot go on: to call {number} of its journal ({call}) the method answers {now}, and "
                f"answered {before} before. Its config or the method's code has changed since. {_INSTEAD}"
            )


_INSTEAD = (
    "Go on with the version of orchestray that the search began with, or start a new search, which may learn from this "
    "one (search.learn_from)."
)
_KEYS: Mapping[str, Collection[str]] = {
    "ask": ("proposal",),
    "allow": ("before", "trials"),
    "learn": ("observations",),
    "widen": ("before", "space"),
    "report": ("report", "decision", "released"),
    "tell": ("finished", "released"),
}
"""Keys of each call in a journal; further ones may be missing."""


def checked_calls(journal: Journal) -> list[dict[str, Any]]:
    """Return the calls of a journal.

    Raises:
        SearchError: this version does not know one of them, or lacks a part of it.
    """
    calls = journal.entries()
    for number, entry in enumerate(calls, start=1):
        call: Any = entry.get("call")
        if call not in _KEYS:
            raise _unreadable(number, f"{call!r} is no call; known are {', '.join(_KEYS)}")
        if missing := [key for key in _KEYS[call] if key not in entry]:
            raise _unreadable(number, f"{call} lacks {', '.join(missing)}")
    return calls


def _unreadable(number: int, why: str) -> SearchError:
    return SearchError(
        f"The search cannot go on: line {number} of its journal is not one that this version of orchestray can repeat "
        f"({why}). Another version has written it, or it is damaged. {_INSTEAD}"
    )


def _renamed(proposal: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return a proposal of a journal with its program as this version names it."""
    return None if proposal is None else {**proposal, "program": program_name(proposal["program"])}


_WORDS: Mapping[type[Decision], str] = {Continue: "continue", Stop: "stop", Pause: "wait", Exploit: "become"}
"""Names of the decisions in journals, including those of version 0.1."""


def _bounded(told: _Told) -> _Told:
    """Return a report, an end or an earlier trial as a method sees it: the largest float would overflow."""
    largest = max(map(abs, (*told.scores, told.score or 0.0)))
    if largest <= _LARGEST_SCORE or math.isinf(largest):
        return told
    scores = tuple(max(-_LARGEST_SCORE, min(one, _LARGEST_SCORE)) for one in (told.score or 0.0, *told.scores))
    return replace(told, score=scores[0], scores=scores[1:])


def _told(decision: Decision) -> dict[str, Any]:
    return {"decision": _WORDS[type(decision)], **asdict(decision)}


def _tuples(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {**values, **{name: tuple(values.get(name, ())) for name in names}}


def _same(a: Any, b: Any) -> bool:
    """Return True if two JSON values are equal, where lists equal tuples, and NaN equals NaN."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    return bool(a == b)


def end_of(session: MethodSession, trial: int) -> tuple[str, str | None] | None:
    """Return how a trial's last report ends it: (status, reason of a stop); None if it continues or is paused.

    One that is over by a condition of its config ends, whatever was decided. A decision to stop is ignored if no steps
    are left to train.
    """
    standing = session.trials[trial]
    if standing.ended is not None or standing.decision is None:
        return None
    if standing.is_over:
        return "succeeded", None
    if isinstance(standing.decision, Pause):
        return None
    if standing.step >= session.budget(trial):
        return "succeeded", None
    return ("stopped", standing.decision.reason) if isinstance(standing.decision, Stop) else None
