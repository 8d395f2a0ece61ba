"""Between a method and the processes of its trials: makes orders of proposals, reports of answers, and the records."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from orchestray.platform.errors import ConfigError, OrchestrayError
from orchestray.search.engine.director import Director, SearchError, end_of
from orchestray.search.engine.orders import GANG, ORDINARY, Order, Told
from orchestray.search.engine.vault import StateFiles, StatePlace
from orchestray.search.methods.base import Become, Report, Stop, Wait
from orchestray.search.records.lines import TrialChange, TrialLine
from orchestray.search.spaces.registry import text_of

if TYPE_CHECKING:
    from orchestray.platform.config.schema import TrainConfig
    from orchestray.search.engine.objective import Objectives

_KEPT_BEST = 3
_REMEMBERED = 64
_FAILURES_BEYOND_PARALLEL = 3
OUT_OF_TIME = "the search's time limit"
"""Why a trial was stopped that goes on if the search is given more time."""


class Records(Protocol):
    """What is written of a search: `search.records.writer.SearchRecords`."""

    @property
    def lines(self) -> Mapping[int, Mapping[str, Any]]: ...

    def report(self, trial: int, step: int, metrics: Mapping[str, float], **more: Any) -> None: ...

    def finished(self, line: TrialLine) -> None: ...

    def lineage(self, trial: int, parent: int | None, step: int, change: str, **more: Any) -> None: ...

    def reopen(self, trials: Collection[int]) -> None: ...


MakeConfig = Callable[[Mapping[str, Any], Any, int, int], "TrainConfig"]
"""From changes, genome, steps and the number of a trial to its config."""


@dataclass(frozen=True)
class Kept:
    """A state in a file that may become the best's."""

    score: float
    trial: int
    step: int
    report: int
    changes: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The trial's hyper-parameters then."""

    @property
    def rank(self) -> tuple[float, int, int]:
        """The smallest is the best; of equal ones the earlier trial's."""
        return (-self.score, self.trial, self.step)


class Conductor:
    """Says what each process does next. For one thread; knows no Ray."""

    def __init__(
        self,
        director: Director,
        make_config: MakeConfig,
        objectives: Objectives,
        records: Records,
        files: StateFiles,
        *,
        parallel: int = 1,
        on_change: Callable[[TrialChange], None] = lambda _change: None,
    ) -> None:
        """Where the director stands in the midst of a search, trials under way go on from their files.

        Args:
            director: of the search.
            make_config: makes the config of a trial.
            objectives: what is looked for.
            records: where it is written down.
            files: of the states that are to survive.
            parallel: trials at once.
            on_change: told how a trial stands, for a display.
        """
        self.director = director
        self._make_config, self._objectives, self._records, self.files = make_config, objectives, records, files
        self._parallel, self._on_change = parallel, on_change
        self._ready: deque[int] = deque()
        """Trials that have begun, are in no process, and are to go on."""
        self._held: set[int] = set()
        """Trials that wait."""
        self._places: dict[tuple[int, int], StatePlace] = {}
        """By (trial, report) where its state lies: of each trial the last two."""
        self._old: dict[int, set[int]] = {}
        """Of each trial the reports before its last whose files may be there."""
        self._seconds: dict[int, float] = {}
        self._measures: dict[int, Mapping[str, float]] = {}
        self._kept: list[Kept] = []
        self._ended: deque[int] = deque(maxlen=_REMEMBERED)
        """The trials that ended last: another may become them yet."""
        self.first_error: str | None = None
        self._num_failed = 0
        self._any_good = False
        self._resume()

    # -- what is to be done --------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        return self.director.is_done and not self.director.live

    @property
    def num_waiting(self) -> int:
        """Trials that are in no process: held, or ready to go on."""
        return len(self._held) + len(self._ready)

    def next_trial(self) -> int | None:
        """A trial for a process that is free; None if there is none now."""
        while self._ready:
            return self._ready.popleft()
        proposal = self.director.ask()
        if proposal is None:
            return None
        trial = proposal.trial
        self._note(trial)
        self._show(trial, "running")
        return trial

    def _note(self, trial: int) -> None:
        """Write down what a trial was made from."""
        proposal = self.director.trials[trial].proposal
        self._records.lineage(trial, proposal.parent, 0, proposal.change, config=dict(proposal.changes))

    def begin(self) -> Order | None:
        """What a free process is told; None if there is nothing for it now.

        Raises:
            SearchError: nothing works.
        """
        while (trial := self.next_trial()) is not None:
            try:
                return self.order(trial)
            except OrchestrayError as error:  # the values that were proposed make no config together
                self.failed(trial, str(error))
        return None

    def order(self, trial: int) -> Order:
        """What a process that has nothing of a trial is told.

        Raises:
            OrchestrayError: the values that were proposed make no config; the trial has to fail by it.
        """
        standing = self.director.trials[trial]
        proposal, at, partly = standing.proposal, standing.at, False
        source = self._source_of(trial)
        if at is None and source is None and proposal.inherits and proposal.parent is not None:
            at, partly = self.director.trials[proposal.parent].at, True
            source = None if at is None else self._place(at)
        config = self._config(trial)
        return Order(
            trial,
            self.director.next_report(trial),
            report=standing.num_reports + 1,
            config=config,
            begins=True,
            program=proposal.program or (ORDINARY if is_alone(config) else GANG),
            arguments=proposal.arguments,
            source=source,
            partly=partly,
            overlaps=proposal.overlaps,
            is_exact=self._hands_on,
            used_s=self._seconds.get(trial, 0.0),
            bar=self._bar,
            needed=self._needed,
        )

    def _config(self, trial: int) -> TrainConfig:
        standing = self.director.trials[trial]
        return self._make_config(standing.changes, standing.proposal.genome, self.director.budget(trial), trial)

    @property
    def _hands_on(self) -> bool:
        return self.director.method.hands_on

    def _source_of(self, trial: int) -> StatePlace | None:
        """What a trial goes on from; None: its beginning.

        Where no trial takes the state of another, whatever it was on the way leads to the same; else it has to be the
        state of its last report, so that what it says at its next is the same, too.
        """
        standing = self.director.trials[trial]
        if self._hands_on and standing.at is not None:
            return self._place(standing.at)
        last = (trial, standing.num_reports)
        if last in self._places:
            return self._places[last]
        reports = [report for report in self.files.reports(trial) if report <= standing.num_reports + 1]
        return StatePlace(trial, reports[-1]) if reports else None

    def _place(self, at: tuple[int, int]) -> StatePlace:
        """Where a state is: with a process, or in its file."""
        return self._places.get(at) or StatePlace(*at)

    @property
    def _needed(self) -> tuple[int, ...]:
        """Trials whose states processes shall keep."""
        return (*self.director.live, *self._ended)

    # -- what came of it -----------------------------------------------------------------------------------------------

    def heard(self, told: Told) -> Order | None:
        """Take in an answer; returns what the same process does next with the trial, None if it is free.

        Raises:
            ConfigError: the objective is not reported.
            SearchError: nothing works.
        """
        trial = told.trial
        self._seconds[trial] = self._seconds.get(trial, 0.0) + told.seconds
        if told.error is not None:
            self.failed(trial, told.error)
            return None
        self._measures[trial] = told.measures or self._measures.get(trial, {})
        try:
            scores = self._objectives.scores({**told.measures, **told.metrics})
        except OrchestrayError as error:
            if isinstance(error, ConfigError) and not self._any_good:
                raise  # nobody has reported it yet, and nobody will
            self.failed(trial, str(error))
            return None
        self._any_good = True
        self._record(told)
        standing, held = self.director.trials[trial], set(self._held)
        evaluations = self._objectives.evaluations([{**told.measures, **each} for each in told.evaluations])
        before = standing.num_reports, dict(standing.changes)
        self.director.report(Report(trial, told.step, scores[0], scores, evaluations, dict(told.told)))
        self._lies(told.place, (trial, before[0] + 1))
        self._note_members(trial, told)
        if told.is_written:
            self._keep(Kept(scores[0], trial, told.step, before[0] + 1, before[1]))
        waits = isinstance(standing.decision, Wait)
        self._show(trial, "waiting" if waits else "running", scores[0], told.metrics)
        if waits:
            self._held.add(trial)
        self._released(held)
        if (end := end_of(self.director, trial, is_over=told.is_over)) is not None:
            self._end(trial, end[0], reason=end[1])
        if standing.ended is not None or trial in self._held or trial in self._ready:
            return None
        return self._further(trial, standing.decision)

    def _record(self, told: Told) -> None:
        if not self.director.method.members_of(told.trial):
            changes = self.director.trials[told.trial].changes
            self._records.report(told.trial, told.step, told.metrics, config=dict(changes))

    def _lies(self, place: StatePlace | None, at: tuple[int, int]) -> None:
        """A trial's state lies there since its last report, which is written down: earlier ones are not needed, but by
        those who are to take them.
        """
        trial, report = at
        if place is not None:
            self._places[at] = place
        self._places.pop((trial, report - 2), None)
        if self._hands_on:
            self._old.setdefault(trial, set()).add(report - 1)
            self._forget_old(trial)

    def _forget_old(self, trial: int) -> None:
        wanted = {standing.origin for standing in map(self.director.trials.__getitem__, self.director.live)}
        for report in [report for report in self._old.get(trial, ()) if (trial, report) not in wanted]:
            self.files.path(trial, report).unlink(missing_ok=True)
            self._old[trial].discard(report)

    def _further(self, trial: int, decision: Any) -> Order:
        standing = self.director.trials[trial]
        order = Order(
            trial,
            self.director.next_report(trial),
            report=standing.num_reports + 1,
            is_exact=self._hands_on,
            bar=self._bar,
            needed=self._needed,
        )
        if not isinstance(decision, Become):
            return order
        self._became(trial, decision)
        source = None if standing.origin is None else self._place(standing.origin)
        return replace(order, config=self._config(trial), source=source)

    def _became(self, trial: int, decision: Become) -> None:
        step = self.director.trials[trial].step
        self._records.lineage(trial, decision.source, step, decision.change, config=dict(decision.changes))

    def _released(self, held: set[int]) -> None:
        """See which of the trials that waited go on, or end."""
        for trial in sorted(held):
            decision = self.director.trials[trial].decision
            if isinstance(decision, Wait) or trial not in self._held:
                continue
            self._held.discard(trial)
            if isinstance(decision, Become):
                self._became(trial, decision)
            end = end_of(self.director, trial)
            if end is not None or isinstance(decision, Stop):
                status, reason = end or ("stopped", None)
                self._end(trial, status, reason=reason)
            else:
                self._ready.append(trial)

    def failed(self, trial: int, error: str) -> None:
        """A trial has failed.

        Raises:
            SearchError: so have all others, and there were enough of them.
        """
        self._end(trial, "failed", error=error)
        self._num_failed += 1
        self.first_error = self.first_error or error
        if not self._any_good and self._num_failed >= self._parallel + _FAILURES_BEYOND_PARALLEL:
            raise SearchError(f"Each of the first {self._num_failed} trials failed; the first: {self.first_error}")

    def lost(self, trial: int) -> None:
        """The process of a trial is gone: it goes on, elsewhere, from its file or from its beginning."""
        self._places.pop((trial, self.director.trials[trial].num_reports), None)
        self._ready.append(trial)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _end(self, trial: int, status: str, *, error: str | None = None, reason: str | None = None) -> None:
        held = set(self._held) - {trial}
        self._held.discard(trial)
        self._write_line(trial, status, error=error, reason=reason)
        self.director.tell(trial, status, error=error)
        standing = self.director.trials[trial]
        self._show(trial, status, standing.score, error=error)
        self._ended.append(trial)
        if not self._hands_on:
            self.files.remove(trial)
            self._places.pop((trial, standing.num_reports), None)
        self._released(held)

    def _note_members(self, trial: int, told: Told) -> None:
        """What the members of a population that is one trial have to say: each is as a trial."""
        metric, value_of = self._objectives.first.metric, self._objectives.first.value
        for number, member in enumerate(self.director.method.members_of(trial)):
            for step, parent, change, changes in member.news:
                self._records.lineage(number, parent, step, change, config=dict(changes))
            if member.last_score is not None:
                metrics = {**(told.metrics if member.leads else {}), metric: value_of(member.last_score)}
                self._records.report(number, told.step, metrics, config=dict(member.changes))

    def _write_line(self, trial: int, status: Any, *, error: str | None, reason: str | None) -> None:
        for line in self._lines(trial, status, error, reason):
            self._records.finished(line)

    def _lines(self, trial: int, status: Any, error: str | None, reason: str | None) -> list[TrialLine]:
        standing = self.director.trials[trial]
        proposal, measures, first = standing.proposal, self._measures.get(trial, {}), self._objectives.first
        seconds = round(self._seconds.get(trial, 0.0), 6)
        more = {"reason": reason} if reason else {}
        members = self.director.method.members_of(trial)
        if members:
            share = round(seconds / len(members), 6)
            return [
                TrialLine(
                    number,
                    status if member.last_score is not None else "failed",
                    None if member.score is None or member.last_score is None else first.value(member.score),
                    member.changes,
                    parent=member.parent,
                    steps=standing.step,
                    seconds=share,
                    error=error if member.last_score is not None else error or "Its loss has diverged.",
                    change=member.change,
                    more={**more, **_best_of(member.best_changes, member.changes)},
                )
                for number, member in enumerate(members)
            ]
        value = None if standing.score is None or status == "failed" else first.value(standing.score)
        several = self._objectives.are_several and standing.scores
        return [
            TrialLine(
                trial,
                status,
                value,
                standing.changes,
                self.director.method.genome_of(proposal),
                proposal.parent,
                standing.step,
                seconds,
                error,
                self._objectives.values(standing.scores) if several else None,
                parameters=_whole(measures.get("parameters")),
                flops=_whole(measures.get("flops")),
                latency_ms=measures.get("latency_ms"),
                change=proposal.change,
                more={**more, **_best_of(standing.best_changes, standing.changes)},
            )
        ]

    def _show(
        self,
        trial: int,
        status: Any,
        score: float | None = None,
        metrics: Mapping[str, float] | None = None,
        error: str | None = None,
    ) -> None:
        standing = self.director.trials[trial]
        value = None if score is None else self._objectives.first.value(score)
        best = next((member for member in self.director.method.members_of(trial) if member.is_best), None)
        changes = standing.changes if best is None else best.best_changes
        space, found = self.director.method.architecture, self.director.method.genome_of(standing.proposal)
        network = None if space is None or found is None else text_of(space, found)
        self._on_change(TrialChange(trial, status, standing.step, value, changes, network, dict(metrics or {}), error))

    def suspend(self) -> None:
        """The search's time is up: what is under way has stopped where it is, until it is given more."""
        for trial in self.director.live:
            self._write_line(trial, "stopped", error=None, reason=OUT_OF_TIME)
            self._show(trial, "stopped", self.director.trials[trial].score)

    # -- the best ------------------------------------------------------------------------------------------------------

    @property
    def _bar(self) -> float:
        """The score from which on a state is worth a file."""
        return self._kept[-1].score if len(self._kept) >= _KEPT_BEST else float("-inf")

    def _keep(self, kept: Kept) -> None:
        """Keep the best few states, one a trial; the files of others go."""
        candidates = [*self._kept, kept]
        best_of = {one.trial: one for one in sorted(candidates, key=lambda one: one.rank, reverse=True)}
        self._kept = sorted(best_of.values(), key=lambda one: one.rank)[:_KEPT_BEST]
        for one in candidates:
            if one not in self._kept:
                self.files.remove_best(one.trial, one.report)

    def best(self) -> Kept | None:
        """The best state there is a file of; None if no trial has succeeded."""
        for kept in self._kept:
            end = self.director.trials[kept.trial].ended
            if end is None or end.status != "failed":
                return kept
        return None

    def order_for_best(self, kept: Kept) -> Order:
        """What a process is told that is to build the best trial's run, with the hyper-parameters it had then."""
        order, proposal = self.order(kept.trial), self.director.trials[kept.trial].proposal
        config = self._make_config(kept.changes, proposal.genome, self.director.budget(kept.trial), kept.trial)
        source = StatePlace(kept.trial, kept.report, is_best=True)
        return replace(order, until=kept.step, config=config, source=source, partly=False)

    def best_trial(self, kept: Kept) -> int:
        """The line of the best: its trial, or the member of a population that is one trial."""
        members = self.director.method.members_of(kept.trial)
        return next((number for number, member in enumerate(members) if member.is_best), kept.trial)

    # -- going on ------------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Where the journal ends in the midst of a search: ends that were due, trials that go on."""
        lines = self._records.lines
        self._records.reopen(
            [trial for trial in self.director.live if lines.get(trial, {}).get("reason") == OUT_OF_TIME]
        )
        for trial, standing in self.director.trials.items():
            self._note(trial)
            for step, decision in standing.taken:
                self._records.lineage(trial, decision.source, step, decision.change, config=dict(decision.changes))
            if standing.score is not None:
                self._any_good = True
            if standing.score is not None and standing.best_report in self.files.best_reports(trial):
                step, report = standing.best_step or 0, standing.best_report or 0
                self._keep(Kept(standing.score, trial, step, report, dict(standing.best_changes)))
            if standing.ended is not None and trial not in self._records.lines:
                status = standing.ended.status
                self._write_line(trial, status, error=standing.ended.error, reason=None)
            if self._hands_on:
                self._old[trial] = {report for report in self.files.reports(trial) if report < standing.num_reports}
                self._forget_old(trial)
        for trial in self.director.live:
            end = end_of(self.director, trial)
            if end is not None:
                self._end(trial, end[0], reason=end[1])
            elif isinstance(self.director.trials[trial].decision, Wait):
                self._held.add(trial)
            elif trial not in self._ready:
                self._ready.append(trial)


def is_alone(config: TrainConfig) -> bool:
    """Whether a run has one worker and no further processes: then the process of its trial trains it."""
    network, exchange = config.strategy.network, config.strategy.exchange
    plain = exchange.type == "allreduce" and config.strategy.compression.type == "none"
    return plain and network.data * network.tensor * network.pipeline == 1 and not config.faults


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _best_of(best: Mapping[str, Any], last: Mapping[str, Any]) -> dict[str, Any]:
    """Of a trial whose hyper-parameters changed after its best report: those it had then."""
    return {"best_config": dict(best)} if best and dict(best) != dict(last) else {}
