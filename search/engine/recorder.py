"""The recorder of a search's trials, for files and display."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from orchestray.search.results.schema import TrialChange, TrialLine
from orchestray.search.spaces.registry import text_of

if TYPE_CHECKING:
    from orchestray.search.engine.messages import TrialResult
    from orchestray.search.engine.objective import Objectives
    from orchestray.search.engine.session import MethodSession, TrialStanding
    from orchestray.search.methods.base import Exploit, PackedMember


_DIVERGED = "Its loss has diverged."


class Records(Protocol):
    """The records of a search, as `search.results.writer.SearchRecords` writes them."""

    @property
    def lines(self) -> Mapping[int, Mapping[str, Any]]: ...

    def report(self, trial: int, step: int, metrics: Mapping[str, float], **more: Any) -> None: ...

    def finished(self, line: TrialLine) -> None: ...

    def lineage(self, trial: int, parent: int | None, step: int, change: str, **more: Any) -> None: ...

    def reopen(self, trials: Collection[int]) -> None: ...


class Account:
    """The recorder of a search's trials: their reports, parents and ends.

    The members of a packed population are recorded as trials, each under its index.
    """

    def __init__(
        self,
        session: MethodSession,
        objectives: Objectives,
        records: Records,
        on_change: Callable[[TrialChange], None],
    ) -> None:
        """
        Args:
            session: conversation with the method, which knows the progress of each trial.
            objectives: objectives of the search.
            records: records to write to.
            on_change: called with each status change of a trial, for a display.
        """
        self._session, self._objectives, self._records, self._on_change = session, objectives, records, on_change
        self._members = session.method.members_of
        self._seconds = {trial: standing.seconds for trial, standing in session.trials.items()}
        self._measures: dict[int, Mapping[str, float]] = {}

    def seconds(self, trial: int) -> float:
        """Return the seconds that processes have worked on the trial, including earlier attempts."""
        return self._seconds.get(trial, 0.0)

    def worked(self, result: TrialResult) -> None:
        """Add the time of a result, and keep its measures."""
        self._seconds[result.trial] = self.seconds(result.trial) + result.seconds
        if result.measures:
            self._measures[result.trial] = result.measures

    def began(self, trial: int) -> None:
        """Record the parent of a trial."""
        proposal = self._session.trials[trial].proposal
        if not self._members(trial):  # members have parents of their own
            self._records.lineage(trial, proposal.parent, 0, proposal.change, config=dict(proposal.changes))

    def became(self, trial: int, step: int, decision: Exploit) -> None:
        """Record that a trial has taken over another's state, or changed its hyper-parameters."""
        self._records.lineage(trial, decision.source, step, decision.change, config=dict(decision.changes))

    def reported(self, result: TrialResult) -> None:
        """Record a report, before it is acted on."""
        if "members" not in result.told:
            changes = self._session.trials[result.trial].changes
            self._records.report(result.trial, result.step, result.metrics, config=dict(changes))

    def members_reported(self, result: TrialResult) -> None:
        """Record the reports of the members of a packed population."""
        metric, value_of = self._objectives.first.metric, self._objectives.first.value
        self.members_became(result.trial)
        for number, member in enumerate(self._members(result.trial)):
            if member.last_score is not None:
                metrics = {**(result.metrics if member.leads else {}), metric: value_of(member.last_score)}
                self._records.report(number, result.step, metrics, config=dict(member.changes))

    def members_became(self, trial: int) -> None:
        """Record the copies that members made before their last report."""
        for number, member in enumerate(self._members(trial)):
            for step, parent, change, changes in member.news:
                self._records.lineage(number, parent, step, change, config=dict(changes))

    def ended(self, trial: int, status: Any, *, error: str | None = None, reason: str | None = None) -> None:
        """Record the end of a trial."""
        more = {"reason": reason} if reason else {}
        lines = [self._member_line(trial, number, status, error, more) for number in range(len(self._members(trial)))]
        for line in lines or [self._line(trial, status, error, more)]:
            self._records.finished(line)

    def reopen_unfinished(self) -> None:
        """Remove the recorded ends of unfinished trials and of their members.

        The search's time limit has ended them, or the search was killed before its method had heard of it.
        """
        live = self._session.live
        self._records.reopen([number for trial in live for number in (range(len(self._members(trial))) or (trial,))])

    def _member_line(
        self, trial: int, number: int, status: Any, error: str | None, more: Mapping[str, Any]
    ) -> TrialLine:
        members = self._members(trial)
        member, first = members[number], self._objectives.first
        has_diverged = member.last_score is None
        return TrialLine(
            number,
            "failed" if has_diverged else status,
            None if member.score is None or has_diverged or status == "failed" else first.value(member.score),
            member.changes,
            parent=member.parent,
            steps=self._session.trials[trial].step,
            seconds=round(self.seconds(trial) / len(members), 6),
            error=error or (_DIVERGED if has_diverged else None),
            change=member.change,
            more={**more, **_best_of(member.best_changes, member.changes)},
        )

    def _line(self, trial: int, status: Any, error: str | None, more: Mapping[str, Any]) -> TrialLine:
        standing = self._session.trials[trial]
        proposal, measures = standing.proposal, self._measures.get(trial, {})
        has_no_value = standing.score is None or status == "failed"
        several = self._objectives.are_several and standing.scores
        return TrialLine(
            trial,
            status,
            None if has_no_value or standing.score is None else self._objectives.first.value(standing.score),
            standing.changes,
            self._session.method.genome_of(proposal),
            proposal.parent,
            standing.step,
            round(self.seconds(trial), 6),
            error,
            self._objectives.values(standing.scores) if several else None,
            parameters=_whole(measures.get("parameters")),
            flops=_whole(measures.get("flops")),
            latency_ms=measures.get("latency_ms"),
            change=proposal.change,
            more={
                **more,
                **self._kept_bounds(standing),
                **_best_of(standing.best_changes, standing.changes),
                **_copies(standing),
            },
        )

    def _kept_bounds(self, standing: TrialStanding) -> dict[str, Any]:
        """Return the values that have bounds, and by how much they break them."""
        if not standing.violations:
            return {}
        values, violation = self._objectives.bounded(standing.violations), standing.violation
        return {"constraints": values, "feasible": not violation, "violation": violation}

    def show(
        self,
        trial: int,
        status: Any,
        score: float | None = None,
        metrics: Mapping[str, float] | None = None,
        error: str | None = None,
        *,
        violation: float = 0.0,
    ) -> None:
        """Show the status of a trial, or of each member of a packed population."""
        standing, method = self._session.trials[trial], self._session.method
        members = self._members(trial)
        for number, member in enumerate(members):
            self._on_change(self._member_change(number, member, standing.step, status, error))
        if members:
            return
        value = None if score is None else self._objectives.first.value(score)
        space, found = method.architecture, method.genome_of(standing.proposal)
        network = None if space is None or found is None else text_of(space, found)
        numbers = dict(metrics or {})
        self._on_change(
            TrialChange(trial, status, standing.step, value, standing.changes, network, numbers, error, violation)
        )

    def _member_change(
        self, number: int, member: PackedMember, step: int, status: Any, error: str | None
    ) -> TrialChange:
        is_live = status in ("running", "waiting")
        has_diverged = member.last_score is None
        shown = member.last_score if is_live else member.score
        return TrialChange(
            number,
            "failed" if has_diverged and not is_live else status,
            step,
            None if shown is None or has_diverged else self._objectives.first.value(shown),
            member.changes if is_live else member.best_changes,
            error=error or (_DIVERGED if has_diverged else None),
        )


def _whole(value: float | None) -> int | None:
    return None if value is None or not math.isfinite(value) else int(value)


def _copies(standing: TrialStanding) -> dict[str, int]:
    """Return the number and the bytes of the states of other trials that a trial has taken over, if there are any."""
    return {"copies": len(standing.copied), "copied_bytes": sum(standing.copied)} if standing.copied else {}


def _best_of(best: Mapping[str, Any], last: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters at the best report, if they changed afterwards."""
    return {"best_config": dict(best)} if best and dict(best) != dict(last) else {}
