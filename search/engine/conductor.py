"""Between a method and the processes of its trials: makes orders of proposals, reports of answers, and the records."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from orchestray.platform.errors import OrchestrayError, TrainingError
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


class Records(Protocol):
    """What is written of a search: `search.records.writer.SearchRecords`."""

    @property
    def lines(self) -> Mapping[int, Mapping[str, Any]]: ...

    def report(self, trial: int, step: int, metrics: Mapping[str, float], **more: Any) -> None: ...

    def finished(self, line: TrialLine) -> None: ...

    def lineage(self, trial: int, parent: int | None, step: int, change: str, **more: Any) -> None: ...


MakeConfig = Callable[[Mapping[str, Any], Any, int, int], "TrainConfig"]
"""From changes, genome, steps and the number of a trial to its config."""


@dataclass(frozen=True)
class Kept:
    """A state in a file that may become the best's."""

    score: float
    trial: int
    step: int

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
        self._make_config, self._objectives, self._records, self._files = make_config, objectives, records, files
        self._parallel, self._on_change = parallel, on_change
        self._ready: deque[int] = deque()
        """Trials that have begun, are in no process, and are to go on."""
        self._held: set[int] = set()
        """Trials that wait."""
        self._places: dict[int, StatePlace] = {}
        """Of each trial where its newest state lies."""
        self._seconds: dict[int, float] = {}
        self._measures: dict[int, Mapping[str, float]] = {}
        self._kept: list[Kept] = []
        self._ended: deque[int] = deque(maxlen=_REMEMBERED)
        """The trials that ended last: another may become them yet."""
        self._hands_on = False
        """Whether trials take the states of others: then those of trials that have ended are kept, too."""
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
        self._records.lineage(trial, proposal.parent, 0, proposal.change, config=dict(proposal.changes))
        self._show(trial, "running")
        return trial

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
        proposal = standing.proposal
        source, partly = self._place_of(trial), False
        if source is None and standing.taken is not None:
            source = self._place_of(standing.taken)
        if source is None and proposal.inherits and proposal.parent is not None:
            self._hands_on = True
            source, partly = self._place_of(proposal.parent), True
        config = self._config(trial)
        return Order(
            trial,
            self.director.next_report(trial),
            config,
            begins=True,
            program=proposal.program or (ORDINARY if is_alone(config) else GANG),
            arguments=proposal.arguments,
            source=source,
            partly=partly,
            bar=self._bar,
            needed=self._needed,
        )

    def _config(self, trial: int) -> TrainConfig:
        standing = self.director.trials[trial]
        return self._make_config(standing.changes, standing.proposal.genome, self.director.budget(trial), trial)

    def _place_of(self, trial: int) -> StatePlace | None:
        """Where the newest state of a trial is: with a process, or in its file."""
        if (place := self._places.get(trial)) is not None:
            return place
        steps = self._files.steps(trial)
        return StatePlace(trial, steps[-1]) if steps else None

    @property
    def _needed(self) -> tuple[int, ...] | None:
        """Trials whose states processes shall keep; None: all."""
        return None if self._hands_on else (*self.director.live, *self._ended)

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
        if told.place is not None:
            self._places[trial] = told.place
        self._measures[trial] = told.measures or self._measures.get(trial, {})
        try:
            scores = self._objectives.scores({**told.measures, **told.metrics})
            evaluations = tuple(self._objectives.scores({**told.measures, **e})[0] for e in told.evaluations)
        except TrainingError as error:
            self.failed(trial, str(error))
            return None
        self._any_good = True
        self._records.report(trial, told.step, told.metrics, config=dict(self.director.trials[trial].changes))
        if told.is_written:
            self._keep(Kept(scores[0], trial, told.step))
        standing, held = self.director.trials[trial], set(self._held)
        self.director.report(Report(trial, told.step, scores[0], scores, evaluations, dict(told.told)))
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

    def _further(self, trial: int, decision: Any) -> Order:
        until, bar, needed = self.director.next_report(trial), self._bar, self._needed
        if not isinstance(decision, Become):
            return Order(trial, until, bar=bar, needed=needed)
        self._became(trial, decision)
        source = None if decision.source == trial else self._place_of(decision.source)
        return Order(trial, until, self._config(trial), source=source, bar=bar, needed=needed)

    def _became(self, trial: int, decision: Become) -> None:
        step = self.director.trials[trial].step
        parent = decision.source
        self._hands_on = self._hands_on or parent != trial
        self._records.lineage(trial, parent, step, decision.change, config=dict(decision.changes))
        if parent != trial:
            self._places.pop(trial, None)
            if (place := self._places.get(parent)) is not None:
                self._places[trial] = place

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
        self._places.pop(trial, None)
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
            self._files.remove(trial)
        self._released(held)

    def _write_line(self, trial: int, status: Any, *, error: str | None, reason: str | None) -> None:
        standing = self.director.trials[trial]
        proposal, measures = standing.proposal, self._measures.get(trial, {})
        value = None if standing.score is None else self._objectives.first.value(standing.score)
        several = self._objectives.are_several and standing.scores
        self._records.finished(
            TrialLine(
                trial,
                status,
                None if status == "failed" else value,
                standing.changes,
                self.director.method.genome_of(proposal),
                proposal.parent,
                standing.step,
                round(self._seconds.get(trial, 0.0), 6),
                error,
                self._objectives.values(standing.scores) if several else None,
                parameters=_whole(measures.get("parameters")),
                flops=_whole(measures.get("flops")),
                latency_ms=measures.get("latency_ms"),
                change=proposal.change,
                more={"reason": reason} if reason else {},
            )
        )

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
        space, found = self.director.method.architecture, self.director.method.genome_of(standing.proposal)
        network = None if space is None or found is None else text_of(space, found)
        self._on_change(
            TrialChange(trial, status, standing.step, value, standing.changes, network, dict(metrics or {}), error)
        )

    def end_all(self, reason: str) -> None:
        """The search's time is up: what is under way has ended where it is."""
        for trial in self.director.live:
            if self.director.trials[trial].ended is None:
                self._end(trial, "stopped", reason=reason)

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
                self._files.remove_best(one.trial, one.step)

    def best(self) -> Kept | None:
        """The best state there is a file of; None if no trial has succeeded."""
        for kept in self._kept:
            end = self.director.trials[kept.trial].ended
            if end is None or end.status != "failed":
                return kept
        return None

    def order_for_best(self, kept: Kept) -> Order:
        """What a process is told that is to build the best trial's run."""
        order = self.order(kept.trial)
        place = StatePlace(kept.trial, kept.step, is_best=True)
        return Order(
            kept.trial, kept.step, order.config, True, order.program, order.arguments, source=place, partly=False
        )

    # -- going on ------------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Where the journal ends in the midst of a search: ends that were due, trials that go on."""
        for trial, standing in self.director.trials.items():
            if standing.score is not None:
                self._any_good = True
            if standing.score is not None and standing.best_step in self._files.best_steps(trial):
                self._keep(Kept(standing.score, trial, standing.best_step or 0))
            self._hands_on = self._hands_on or standing.taken is not None or standing.proposal.inherits
            if standing.ended is not None and trial not in self._records.lines:
                status = standing.ended.status
                self._write_line(trial, status, error=standing.ended.error, reason=None)
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
