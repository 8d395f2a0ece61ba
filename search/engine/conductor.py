"""Between a method and the processes of its trials: makes orders of proposals, reports of answers, and the records."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestray.platform.config.search.gangs import is_alone
from orchestray.platform.errors import ConfigError, OrchestrayError
from orchestray.search.engine.account import Account
from orchestray.search.engine.director import Director, SearchError, TrialStanding, end_of
from orchestray.search.engine.orders import GANG, ORDINARY, Order, Told
from orchestray.search.engine.state_files import StatePlace
from orchestray.search.engine.states import Kept, States
from orchestray.search.methods.base import Become, Proposal, Report, Stop, Wait

if TYPE_CHECKING:
    from orchestray.platform.config.schema import TrainConfig
    from orchestray.search.engine.account import Records
    from orchestray.search.engine.objective import Objectives
    from orchestray.search.engine.state_files import StateFiles
    from orchestray.search.records.lines import TrialChange

_REMEMBERED = 64
_FAILURES_BEYOND_PARALLEL = 3
OUT_OF_TIME = "the search's time limit"
"""Why a trial was stopped that goes on if the search is given more time."""


MakeConfig = Callable[[Mapping[str, Any], Any, int, int], "TrainConfig"]
"""From changes, genome, steps and the number of a trial to its config."""


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
        self.states = States(director, files)
        self._account = Account(director, objectives, records, on_change)
        self._make_config, self._objectives, self._records = make_config, objectives, records
        self._parallel = parallel
        self._ready: deque[int] = deque()
        """Trials that have begun, are in no process, and are to go on."""
        self._held: set[int] = set()
        """Trials that wait."""
        self._ended: deque[int] = deque(maxlen=_REMEMBERED)
        """The trials that ended last: another may become them yet."""
        self.first_error: str | None = None
        self._num_failed = 0
        self._is_reported = False
        """Whether the objective was reported by any trial: then its name is right, whatever became of that trial."""
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

    @property
    def num_good(self) -> int:
        """Trials that have ended well."""
        return sum(standing.ended is not None for standing in self._promising())

    def _promising(self) -> Iterator[TrialStanding]:
        """The trials that have reported and have not failed: they have ended well, or may yet."""
        for standing in self.director.trials.values():
            if standing.score is not None and (standing.ended is None or standing.ended.status != "failed"):
                yield standing

    def next_trial(self) -> int | None:
        """A trial for a process that is free; None if there is none now."""
        while self._ready:
            return self._ready.popleft()
        proposal = self.director.ask()
        if proposal is None:
            return None
        trial = proposal.trial
        self._account.began(trial)
        self._account.show(trial, "running")
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
        return self._order(trial, self.director.next_report(trial))

    def _order(self, trial: int, until: int) -> Order:
        standing = self.director.trials[trial]
        proposal, at, partly = standing.proposal, standing.at, False
        source = self.states.source_of(trial)
        if at is None and source is None and proposal.inherits and proposal.parent is not None:
            at, partly = self.director.trials[proposal.parent].at, True
            source = None if at is None else self.states.place(at)
        config = self._config(trial)
        return Order(
            trial,
            until,
            report=standing.num_reports + 1,
            config=config,
            begins=True,
            program=_program(proposal, config),
            arguments=proposal.arguments,
            source=source,
            partly=partly,
            overlaps=proposal.overlaps,
            is_exact=self.states.are_exact,
            used_s=self._account.seconds(trial),
            bar=self.states.bar(trial),
            needed=self._needed,
        )

    def _config(self, trial: int) -> TrainConfig:
        standing = self.director.trials[trial]
        return self._make_config(standing.changes, standing.proposal.genome, self.director.budget(trial), trial)

    @property
    def _needed(self) -> tuple[int, ...]:
        """Trials whose states processes shall keep."""
        return (*self.director.live, *self._ended)

    # -- what came of it -----------------------------------------------------------------------------------------------

    def heard(self, told: Told) -> Order | None:
        """Take in an answer; returns what the same process does next with the trial, None if it is free.

        Raises:
            ConfigError: the objective is not reported.
            SearchError: nothing works, or the trial's state could not be written.
        """
        trial = told.trial
        self._account.worked(told)
        if told.is_unsaved:
            raise SearchError(f"The search cannot go on: {told.error} Make room, and go on with --resume.")
        if told.is_misnamed and not self._is_reported:
            raise ConfigError(told.error or "")
        if told.error is not None:
            self.failed(trial, told.error)
            return None
        try:
            scores = self._objectives.scores({**told.measures, **told.metrics})
        except OrchestrayError as error:
            if isinstance(error, ConfigError) and not self._is_reported:
                raise  # nobody has reported it yet, and nobody will
            self.failed(trial, str(error))
            return None
        self._is_reported = True
        self._account.reported(told)
        standing, held = self.director.trials[trial], set(self._held)
        evaluations = self._objectives.evaluations([{**told.measures, **each} for each in told.evaluations])
        before = standing.num_reports, dict(standing.changes)
        report = Report(trial, told.step, scores[0], scores, evaluations, dict(told.told))
        self.director.report(report, seconds=self._account.seconds(trial))
        self.states.lies(told.place, (trial, before[0] + 1))
        self._account.members_reported(told)
        if told.is_written:
            self.states.keep(Kept(scores[0], trial, told.step, before[0] + 1, before[1]))
        waits = isinstance(standing.decision, Wait)
        self._account.show(trial, "waiting" if waits else "running", scores[0], told.metrics)
        if waits:
            self._held.add(trial)
        self._released(held)
        if (end := end_of(self.director, trial, is_over=told.is_over)) is not None:
            self._end(trial, end[0], reason=end[1])
        if standing.ended is not None or trial in self._held or trial in self._ready:
            return None
        try:
            return self._further(trial, standing.decision)
        except OrchestrayError as error:  # what it is to become makes no config, as in `begin`
            self.failed(trial, str(error))
            return None

    def _further(self, trial: int, decision: Any) -> Order:
        """
        Raises:
            OrchestrayError: what it is to become makes no config; the trial has to fail by it.
        """
        standing = self.director.trials[trial]
        order = Order(
            trial,
            self.director.next_report(trial),
            report=standing.num_reports + 1,
            is_exact=self.states.are_exact,
            bar=self.states.bar(trial),
            needed=self._needed,
        )
        if not isinstance(decision, Become):
            return order
        self._account.became(trial, standing.step, decision)
        proposal, config = standing.proposal, self._config(trial)
        source = None if standing.origin is None else self.states.place(standing.origin)
        program = _program(proposal, config)  # what cannot change in its place is built again
        return replace(order, config=config, program=program, arguments=proposal.arguments, source=source)

    def _released(self, held: set[int]) -> None:
        """See which of the trials that waited go on, or end."""
        for trial in sorted(held):
            decision = self.director.trials[trial].decision
            if isinstance(decision, Wait) or trial not in self._held:
                continue
            self._held.discard(trial)
            if isinstance(decision, Become):
                self._account.became(trial, self.director.trials[trial].step, decision)
            end = end_of(self.director, trial)
            if end is not None or isinstance(decision, Stop):
                status, reason = end or ("stopped", None)
                self._end(trial, status, reason=reason)
            else:
                self._ready.append(trial)

    def failed(self, trial: int, error: str) -> None:
        """A trial has failed.

        Raises:
            SearchError: so have all others that have reported or ended, and there were enough of them.
        """
        self._end(trial, "failed", error=error)
        self._num_failed += 1
        self.first_error = self.first_error or error
        are_enough = self._num_failed >= self._parallel + _FAILURES_BEYOND_PARALLEL
        if are_enough and next(self._promising(), None) is None:
            raise SearchError(f"Each of the first {self._num_failed} trials failed; the first: {self.first_error}")

    def lost(self, trial: int) -> None:
        """The process of a trial is gone: it goes on, elsewhere, from its file or from its beginning."""
        self.states.lost(trial)
        self._ready.append(trial)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _end(self, trial: int, status: str, *, error: str | None = None, reason: str | None = None) -> None:
        held = set(self._held) - {trial}
        self._held.discard(trial)
        self._account.ended(trial, status, error=error, reason=reason)
        self.director.tell(trial, status, error=error)
        standing = self.director.trials[trial]
        self._account.show(trial, status, standing.score, error=error)
        self._ended.append(trial)
        self.states.ended(trial)
        self._released(held)

    def suspend(self) -> None:
        """The search's time is up: what is under way has stopped where it is, until it is given more."""
        for trial in self.director.live:
            self._account.ended(trial, "stopped", reason=OUT_OF_TIME)
            self._account.show(trial, "stopped", self.director.trials[trial].score)

    # -- the best ------------------------------------------------------------------------------------------------------

    def best(self) -> Kept | None:
        """The best state that there is a file of or that can be had again; None if no trial has succeeded."""
        return self.states.best()

    def order_for_best(self, kept: Kept) -> Order:
        """What a process is told that is to build the best trial's run, with the hyper-parameters it had then."""
        # A method need not know any more when a trial that has ended would report next.
        order, proposal = self._order(kept.trial, kept.step), self.director.trials[kept.trial].proposal
        config = self._make_config(kept.changes, proposal.genome, self.director.budget(kept.trial), kept.trial)
        source = None if kept.is_lost else StatePlace(kept.trial, kept.report, is_best=True)
        return replace(order, config=config, source=source, partly=False)

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
            self._account.began(trial)
            self._account.members_became(trial)
            for step, decision in standing.taken:
                self._account.became(trial, step, decision)
            if standing.score is not None:
                self._is_reported = True
            if standing.ended is not None and standing.ended.status == "failed":
                self._num_failed += 1
                self.first_error = self.first_error or standing.ended.error
            if standing.ended is not None and trial not in self._records.lines:
                status = standing.ended.status
                self._account.ended(trial, status, error=standing.ended.error)
        for trial in self.director.live:
            end = end_of(self.director, trial)
            if end is not None:
                self._end(trial, end[0], reason=end[1])
            elif isinstance(self.director.trials[trial].decision, Wait):
                self._held.add(trial)
            elif trial not in self._ready:
                self._ready.append(trial)


def _program(proposal: Proposal, config: TrainConfig) -> str:
    """What trains a trial."""
    return proposal.program or (ORDINARY if is_alone(config) else GANG)
