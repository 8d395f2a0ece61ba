"""The controller of a search: it turns a method's proposals into tasks, and trial results into reports and records."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import ConfigError, OrchestrayError
from orchestray.search.checkpoints.state_files import StateAt
from orchestray.search.checkpoints.states import BestCheckpoint, States
from orchestray.search.config.gangs import is_alone
from orchestray.search.engine.messages import GANG, ORDINARY, TrialResult, TrialTask
from orchestray.search.engine.recorder import Account
from orchestray.search.engine.session import MethodSession, SearchError, TrialStanding, end_of
from orchestray.search.methods.base import Exploit, Pause, Proposal, Report, Stop
from orchestray.search.results.schema import OUT_OF_TIME

if TYPE_CHECKING:
    from orchestray.search.checkpoints.state_files import StateFiles
    from orchestray.search.engine.objective import Objectives
    from orchestray.search.engine.recorder import Records
    from orchestray.search.results.schema import TrialChange
    from orchestray.trainers.config.schema import TrainConfig

_FAILURES_BEYOND_PARALLEL = 3

MakeConfig = Callable[[Mapping[str, Any], Any, int, int], "TrainConfig"]
"""Function from changes, genome, steps and trial number to the config of the trial."""


class SearchController:
    """The component that decides what each process does next. Not thread-safe; independent of Ray."""

    def __init__(
        self,
        session: MethodSession,
        make_config: MakeConfig,
        objectives: Objectives,
        records: Records,
        files: StateFiles,
        *,
        parallel: int = 1,
        unit: str = "steps",
        on_change: Callable[[TrialChange], None] = lambda _change: None,
    ) -> None:
        """Take over the state of the session; unfinished trials resume from their files.

        Args:
            session: conversation with the search's method.
            make_config: makes the config of a trial.
            objectives: objectives of the search.
            records: records of the search.
            files: files of states that outlive their processes.
            parallel: number of concurrent trials.
            unit: unit in which the method counts, and trials report: `steps`, `epochs` or `samples`.
            on_change: called with each status change of a trial, for a display.
        """
        self.session = session
        self.states = States(session, files)
        self._account = Account(session, objectives, records, on_change)
        self._make_config, self._objectives, self._records = make_config, objectives, records
        self._parallel = parallel
        self.unit = unit
        self._of_all = {} if unit == "steps" else {"unit": unit}
        """Arguments of the programs of all trials."""
        self._ready: deque[int] = deque()
        """Trials that have begun, are not in a process, and are to continue."""
        self._held: set[int] = set()
        """Trials that the method has paused."""
        self.first_error: str | None = None
        self._num_failed = 0
        self._is_reported = False
        """True if any trial has reported the objective: then its name is right, whatever happened to that trial."""
        self._resume()

    # -- what is to be done --------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """True if nothing is left to do."""
        return self.session.is_done and not self.session.live

    @property
    def num_waiting(self) -> int:
        """Number of trials without a process: paused, or ready to continue."""
        return len(self._held) + len(self._ready)

    @property
    def num_good(self) -> int:
        """Number of trials that have ended without failing."""
        return sum(standing.ended is not None for standing in self._promising())

    def _promising(self) -> Iterator[TrialStanding]:
        """Yield the trials that have reported and have not failed: they have ended well, or may yet."""
        for standing in self.session.trials.values():
            if standing.score is not None and (standing.ended is None or standing.ended.status != "failed"):
                yield standing

    def next_trial(self) -> int | None:
        """Return a trial for a free process; None if there is none now."""
        while self._ready:
            return self._ready.popleft()
        proposal = self.session.ask()
        if proposal is None:
            return None
        trial = proposal.trial
        self._account.began(trial)
        self._account.show(trial, "running")
        return trial

    def first_task(self, trial: int) -> TrialTask | None:
        """Return the task for a process that has nothing of the trial yet; None if the trial has failed.

        Raises:
            SearchError: too many trials have failed, and none has succeeded.
        """
        try:
            return self._whole_task(trial, self.session.next_report(trial))
        except OrchestrayError as error:  # the proposed values do not form a valid config
            self.failed(trial, str(error))
        return None

    def _whole_task(self, trial: int, until: int) -> TrialTask:
        """Return a task for a process that has nothing of the trial yet.

        Raises:
            OrchestrayError: the proposed values do not form a valid config.
        """
        proposal, partly = self.session.trials[trial].proposal, False
        source = self.states.source_of(trial)
        if source is None and proposal.inherits and proposal.parent is not None:
            at, partly = self.session.trials[proposal.parent].at, True
            source = None if at is None else StateAt(*at)
        config = self._config(trial)
        return replace(
            self._task(trial, until),
            config=config,
            begins=True,
            program=_program(proposal, config),
            arguments={**proposal.arguments, **self._of_all},
            source=source,
            partly=partly,
            overlaps=proposal.overlaps,
            used_s=self._account.seconds(trial),
        )

    def _task(self, trial: int, until: int) -> TrialTask:
        """Return a task for the process that has the trial."""
        is_exact = self.states.are_exact
        return TrialTask(
            trial,
            until,
            report=self.session.trials[trial].num_reports + 1,
            is_exact=is_exact,
            writes_state=is_exact or until < self.session.budget(trial),
            bar=self.states.bar(trial),
        )

    def _config(self, trial: int) -> TrainConfig:
        standing = self.session.trials[trial]
        return self._make_config(standing.changes, standing.proposal.genome, self.session.budget(trial), trial)

    # -- what came of it -----------------------------------------------------------------------------------------------

    def receive(self, result: TrialResult) -> TrialTask | None:
        """Process a result; return the next task of the same process for the trial, or None if it is free.

        Raises:
            ConfigError: the objective is not reported.
            SearchError: all trials fail, or the trial's state could not be written.
        """
        trial = result.trial
        self._account.worked(result)
        if result.is_unsaved:
            raise SearchError(f"The search cannot go on: {result.error} Make room, and go on with --resume.")
        if result.is_misnamed and not self._is_reported:
            raise ConfigError(result.error or "")
        if result.error is not None:
            self.failed(trial, result.error)
            return None
        try:
            values = {**result.measures, **result.metrics}
            scores, violations = self._objectives.scores(values), self._objectives.violations(values)
        except OrchestrayError as error:
            if isinstance(error, ConfigError) and not self._is_reported:
                raise  # no trial has reported it yet, and none will
            self.failed(trial, str(error))
            return None
        self._is_reported = True
        self._account.reported(result)
        standing = self.session.trials[trial]
        evaluations = self._objectives.evaluations([{**result.measures, **each} for each in result.evaluations])
        before = standing.num_reports, dict(standing.changes)
        report = Report(trial, result.step, scores[0], scores, evaluations, dict(result.told), violations)
        seconds, copied_bytes = self._account.seconds(trial), result.copied_bytes
        self.session.report(report, seconds=seconds, copied_bytes=copied_bytes, is_over=result.is_over)
        self.states.reported(trial, is_written=result.is_written)
        self._account.members_reported(result)
        if result.is_written:
            self.states.keep(BestCheckpoint(scores[0], trial, result.step, before[0] + 1, before[1], report.violation))
        waits = isinstance(standing.decision, Pause) and not result.is_over
        status = "waiting" if waits else "running"
        self._account.show(trial, status, scores[0], result.metrics, violation=report.violation)
        if waits:
            self._held.add(trial)
        self._released()
        if (end := end_of(self.session, trial)) is not None:
            self._end(trial, end[0], reason=end[1])
        if standing.ended is not None or trial in self._held or trial in self._ready:
            return None
        try:
            return self._further(trial, standing.decision)
        except OrchestrayError as error:  # its new values do not form a valid config, as in `begin`
            self.failed(trial, str(error))
            return None

    def _further(self, trial: int, decision: Any) -> TrialTask:
        """Return the next task of a running trial, which may continue as another.

        Raises:
            OrchestrayError: its new values do not form a valid config; the trial then has to fail.
        """
        standing = self.session.trials[trial]
        order = self._task(trial, self.session.next_report(trial))
        if not isinstance(decision, Exploit):
            return order
        self._account.became(trial, standing.step, decision)
        proposal, config = standing.proposal, self._config(trial)
        source = None if standing.origin is None else StateAt(*standing.origin)
        program = _program(proposal, config)  # rebuilds what cannot change in place
        arguments = {**proposal.arguments, **self._of_all}
        return replace(order, config=config, program=program, arguments=arguments, source=source)

    def _released(self) -> None:
        """Continue or end the paused trials on which the method has decided."""
        for trial in sorted(self._held.intersection(self.session.released)):
            decision = self.session.trials[trial].decision
            if isinstance(decision, Pause) or trial not in self._held:
                continue
            self._held.discard(trial)
            if isinstance(decision, Exploit):
                self._account.became(trial, self.session.trials[trial].step, decision)
            end = end_of(self.session, trial)
            if end is not None or isinstance(decision, Stop):
                status, reason = end or ("stopped", None)
                self._end(trial, status, reason=reason)
            else:
                self._ready.append(trial)

    def failed(self, trial: int, error: str) -> None:
        """Record that a trial has failed.

        Raises:
            SearchError: enough trials have failed, and no other has reported or ended well.
        """
        self._end(trial, "failed", error=error)
        self._num_failed += 1
        self.first_error = self.first_error or error
        are_enough = self._num_failed >= self._parallel + _FAILURES_BEYOND_PARALLEL
        if are_enough and next(self._promising(), None) is None:
            raise SearchError(f"Each of the first {self._num_failed} trials failed; the first: {self.first_error}")

    def lost(self, trial: int) -> None:
        """Schedule a trial whose process is gone, to resume elsewhere from its file or from scratch."""
        self._ready.append(trial)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _end(self, trial: int, status: str, *, error: str | None = None, reason: str | None = None) -> None:
        self._held.discard(trial)
        self._account.ended(trial, status, error=error, reason=reason)
        self.session.tell(trial, status, error=error)
        standing = self.session.trials[trial]
        self._account.show(trial, status, standing.score, error=error, violation=standing.violation)
        self.states.ended(trial)
        self._released()

    def suspend(self) -> None:
        """Record unfinished trials as stopped because the search's time is up, until it is given more."""
        for trial in self.session.live:
            self._account.ended(trial, "stopped", reason=OUT_OF_TIME)
            self._account.show(trial, "stopped", self.session.trials[trial].score)

    # -- the best ------------------------------------------------------------------------------------------------------

    def is_among_the_best(self, trial: int) -> bool:
        """Return True if a trial has ended well and its state is one of the few that are kept."""
        return self.session.trials[trial].ended is not None and self.states.keeps(trial)

    def best(self) -> BestCheckpoint | None:
        """Return the best state that has a file or can be reproduced; None if no trial has succeeded."""
        return self.states.best()

    def order_for_best(self, kept: BestCheckpoint) -> TrialTask:
        """Return the task for building the best trial's run, with the hyper-parameters it had at its best report."""
        # The method may have forgotten when a trial that has ended would report next.
        order, proposal = self._whole_task(kept.trial, kept.step), self.session.trials[kept.trial].proposal
        config = self._make_config(kept.changes, proposal.genome, self.session.budget(kept.trial), kept.trial)
        source = None if kept.is_lost else kept.at
        return replace(order, config=config, source=source, partly=False)

    def best_trial(self, kept: BestCheckpoint) -> int:
        """Return the number of the best trial, or of the best member of a packed population."""
        members = self.session.method.members_of(kept.trial)
        return next((number for number, member in enumerate(members) if member.is_best), kept.trial)

    # -- going on ------------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Restore a search from its journal: record ends that were due, and schedule the unfinished trials."""
        self._account.reopen_unfinished()
        for trial, standing in self.session.trials.items():
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
        for trial in self.session.live:
            end = end_of(self.session, trial)
            if end is not None:
                self._end(trial, end[0], reason=end[1])
            elif isinstance(self.session.trials[trial].decision, Pause):
                self._held.add(trial)
            elif trial not in self._ready:
                self._ready.append(trial)


def _program(proposal: Proposal, config: TrainConfig) -> str:
    """Return the name of the program that trains a trial."""
    return proposal.program or (ORDINARY if is_alone(config) else GANG)
