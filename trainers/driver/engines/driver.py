"""The driver of a run of replicas in step: waits for what happens to the gang, and does what the controller decides.

It decides nothing about the algorithm, never imports torch, and is the only writer of the run directory. Only
checkpoints and the model are written by rank 0.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from orchestray.platform.actors.death_cause import LOSSES
from orchestray.platform.actors.gang import MemberLostError
from orchestray.platform.actors.member import Failure
from orchestray.platform.actors.pool import acquire, release
from orchestray.platform.errors import TrainingError
from orchestray.trainers.config.settings import Start
from orchestray.trainers.core.outcome import PEER_LOST
from orchestray.trainers.driver.control import controller, decisions, events
from orchestray.trainers.driver.control.evacuation import Evacuation
from orchestray.trainers.driver.control.scaling import Scaling, scaled
from orchestray.trainers.driver.runlog.actors_file import ActorsFile
from orchestray.trainers.driver.runlog.hang_report import HangReport
from orchestray.trainers.driver.runlog.kill_schedule import KillSchedule
from orchestray.trainers.driver.runlog.line_fetcher import LineFetcher, copies_of
from orchestray.trainers.driver.runlog.losses import Losses

if TYPE_CHECKING:
    from orchestray.platform.actors.placement import Shape
    from orchestray.trainers.driver.control.attempt import Attempt
    from orchestray.trainers.driver.runlog.run_log import RunLog

HOST = "orchestray.trainers.loop.host:ReplicaHost"
_ALL = 0
"""Index of the unit of all workers."""
_LISTEN_S = 0.5
_DRAIN_INTERVAL_S = 0.1
_DRAIN_TIMEOUT_S = 0.3
_RESERVE_AFTER_S = 5.0
_SETTLE_TIMEOUT_S = 120.0
"""Seconds that a survivor may go on computing before it notices that another worker is lost."""


class Driver:
    """A driver of one training run with a gang of replicas."""

    def __init__(self, attempt: Attempt, shape: Shape) -> None:
        """
        Args:
            attempt: attempt at the run.
            shape: shape of the gang to form.
        """
        self._attempt, self._settings, self._shape = attempt, attempt.settings, shape
        self._run_log = run_log = attempt.run_log
        self._writer, self._progress, self.run_progress = run_log.writer, run_log.progress, run_log.run_progress
        self._line_fetcher = LineFetcher(run_log)
        self._hosted = self._announced = False
        self._kills = KillSchedule(attempt.settings.faults, shape.role)
        self._losses = Losses(run_log, self._kills, shape.role)
        self._interrupts = False
        """True if the workers are to stop as soon as they work."""
        self._scaled_at: int | None = None
        """Step after which the number of replicas was changed; None once they have met again."""
        self._rank_of: dict[Any, int] = {}
        """Ranks of the workers that train, by the references of their answers."""
        self._answers: dict[int, Any] = {}
        self._settle_by_s: float | None = None
        self._outcome: Any = None
        restarts = self.run_progress.restarts
        self._state = controller.State.of(
            shape.size, shape.size, max_restarts=attempt.max_restarts, restarts=restarts, in_step=True
        ).employed(_ALL)

    def run(self) -> Any:
        """Train to the end; return the replicas' `Outcome`.

        Raises:
            OrchestrayError: the run failed; its text says what the user can do.
        """
        self._gang = gang = acquire(self._attempt.cluster, self._shape, self._progress.event)
        self._run_log.fetch_copies = self._fetch_copies
        self._actors_file = ActorsFile(self._run_log, [gang])
        self._hang_report = HangReport(self._run_log, [gang], self._attempt.patience.report_s)
        gang.while_waiting = self._look
        gang.patience, gang.keep_stacks = self._attempt.patience, self._losses.keep_stacks
        self._scaling = Scaling(self._run_log, gang, HOST, self._settings)
        self._evacuation = Evacuation([(gang, HOST)], self._run_log, self._losses)
        try:
            self._train_until_done()
        finally:
            self._scaling.close()
            if self._outcome is not None:
                release(gang)
            else:
                gang.close()
            self._writer.actors([])
        return self._outcome

    def _train_until_done(self) -> None:
        happened = deque(self._begin())
        while self._outcome is None:
            if happened:
                happened += self._tell(happened.popleft())
            else:
                happened += self._wait() if self._rank_of else self._begin()

    # -- what the controller decides -----------------------------------------------------------------------------------

    def _tell(self, event: events.Event) -> list[events.Event]:
        """Tell the controller what has happened, and do what it decides; return what happens meanwhile."""
        self._state, decided = controller.step(self._state, event)
        if any(isinstance(decision, decisions.Ending) for decision in decided):
            if self._all_are_done():
                self._fetch_rest()
                self._hosted = False  # the hosts are to stop, should they train again
            else:
                self._line_fetcher.take()  # lines of the attempt that is over
        return [more for decision in decided for more in self._act(decision)]

    def _act(self, decision: decisions.Decision) -> list[events.Event]:
        """Carry out a decision; `_begin` sets the workers to work once all others are carried out."""
        match decision:
            case decisions.Abort() if self._rank_of:
                self._settle_by_s = time.monotonic() + _SETTLE_TIMEOUT_S
                self._gang.control("abort")
            case decisions.Record(causes):
                self._losses.begin()
                self._losses.record(self._shape.role, causes)
            case decisions.Replace(rank):
                self._losses.replaced(self._shape.role, rank, spare=self._gang.replace(rank))
                self._actors_file.write()
            case decisions.Employ():
                self._rank_of.clear()
                self._interrupts = False
                if self._state.restarts != self.run_progress.restarts:
                    self._losses.begin()
                    self._losses.show(self._state.restarts)
            case decisions.Interrupt():
                self._interrupts = True
                if self._rank_of:
                    self._gang.control("request_stop")
            case decisions.Grow() | decisions.Resize() | decisions.Refuse() | decisions.Move():
                return self._change(decision)
            case decisions.Fail(rank):
                failure = self._answers[rank]
                self._writer.event("worker_failed", role=self._shape.role, rank=rank, traceback=failure.traceback)
                raise failure.error
            case decisions.GiveUp(reason):
                raise TrainingError(reason)
            case decisions.Finish():
                self._outcome = self._answers[0]
        return []

    def _change(
        self, decision: decisions.Grow | decisions.Resize | decisions.Refuse | decisions.Move
    ) -> list[events.Event]:
        """Change the number or the places of the workers."""
        match decision:
            case decisions.Move():
                self._evacuation.move()
                self._actors_file.write()
            case decisions.Grow():
                return self._scaling.grow()
            case decisions.Refuse(reason):
                self._scaling.refuse(reason)
            case decisions.Resize():
                self._settings = scaled(self._settings, self._scaling.resize())
                self._scaled_at = self._answers[0].step
                self._actors_file.write()
        return []

    def _all_are_done(self) -> bool:
        """Return True if all workers have stopped because there was nothing more to do, or they were to stop."""
        answers = self._answers.values()
        return len(answers) == len(self._gang.slots) and not any(
            isinstance(answer, Failure) or answer == PEER_LOST for answer in answers
        )

    def _begin(self) -> list[events.Event]:
        """Have all workers meet and train; return the losses if that fails."""
        gang = self._gang
        self._answers, self._settle_by_s = {}, None
        try:
            if not self._hosted:
                gang.host(HOST, self._settings)
                self._hosted = True
            if not self._announced:
                self._announce()
            gang.meet()
        except MemberLostError as loss:
            others = (rank for rank in range(len(gang.slots)) if rank not in loss.lost)
            lost: list[events.Event] = [events.Lost(rank, cause) for rank, cause in loss.lost.items()]
            return [*lost, *(events.StoppedEarly(rank, explained=False) for rank in others)]
        if self._scaled_at is not None:
            self._scaling.done(self._scaled_at)
            self._scaled_at = None
        start = Start(self.run_progress.started_at, self._attempt.checkpoint, attempt=self._kills.num_over())
        self._rank_of = {reference: rank for rank, reference in enumerate(gang.call("train", start))}
        if self._interrupts:
            gang.control("request_stop")
        return []

    def _announce(self) -> None:
        # The call is queued behind the building of the host: the member may have just replaced a lost one.
        sizes = self._gang.gather_one(self._gang.call_one(0, "describe"), 0)
        self._run_log.announce(
            sizes,
            self._settings.batch_size,
            resumed=self._attempt.checkpoint is not None,
            workers=len(self._gang.slots),
        )
        self._announced = True
        self._actors_file.announce()

    # -- what happens --------------------------------------------------------------------------------------------------

    def _wait(self) -> list[events.Event]:
        """Wait for answers, losses and lines, for a while; return what the controller has to know."""
        gang, progress = self._gang, self.run_progress
        is_stopping = self._settle_by_s is not None
        # Not when stopping, or dead: requests to a dead rank 0 fail at once, again and again.
        asked = [] if is_stopping or gang.slots[0].death else [self._ask_lines()]
        ready, _ = ray.wait([*self._rank_of, *asked], num_returns=1, timeout=_LISTEN_S)
        self._writer.raise_if_failed()
        happened: list[events.Event] = [events.StopWanted()] if self._attempt.stop.is_set() else []
        for reference in ready:
            if reference in asked:
                self._line_fetcher.take()
            else:
                happened.append(self._answered(self._rank_of.pop(reference), reference))
        for reference, cause in gang.unheard(self._rank_of).items():
            self._losses.begin()
            happened.append(events.Lost(self._rank_of.pop(reference), cause))
        if progress.lost_at_s is None:
            gang.refill_spares()
            if self._is_under_way():
                gang.keep_reserve()
        gang.check_places()
        if not is_stopping and gang.is_deadlocked():
            gang.save_stacks(range(len(gang.slots)))
            self._losses.stalled(self._shape.role)
            happened.append(events.Stalled(_ALL))
        self._look()
        if self._settle_by_s is not None and time.monotonic() > self._settle_by_s:
            self._rank_of.clear()
            happened.append(events.TimeUp(_ALL))
        return [*happened, *self._scaling.news(), *self._evacuation.news(self._settings)]

    def _look(self) -> None:
        """Look at the processes: which there are, what they print, and if they make steps."""
        self._actors_file.write()
        self._hang_report.look()

    def _answered(self, rank: int, reference: Any) -> events.Event:
        try:
            answer = self._answers[rank] = ray.get(reference)
        except LOSSES as error:
            self._losses.begin()
            return events.Lost(rank, self._gang.cause(rank, error))
        except RayError as error:
            raise TrainingError(f"Worker {rank} failed: {str(error).strip().splitlines()[-1]}") from error
        if isinstance(answer, Failure):
            return events.Failed(rank)
        if answer == PEER_LOST:
            return events.StoppedEarly(rank, explained=False)
        return events.Done(rank, interrupted=answer.ended == "interrupted")

    def _is_under_way(self) -> bool:
        """Return True if steps have run for a while, so that starting a process delays neither the first step nor a
        short run.
        """
        first_s = self.run_progress.first_step_s
        return first_s is not None and self.run_progress.now_s() - first_s > _RESERVE_AFTER_S

    # -- reports of the workers ----------------------------------------------------------------------------------------

    def _ask_lines(self, timeout_s: float = _DRAIN_TIMEOUT_S) -> Any:
        written = self.run_progress.written_step
        return self._line_fetcher.ask(lambda: self._gang.control_one(0, "drain", timeout_s, _DRAIN_INTERVAL_S, written))

    def _fetch_rest(self) -> None:
        """Record what the workers have reported until their end."""
        more = True
        while more:
            self._ask_lines(timeout_s=0.0)
            more = self._line_fetcher.take()
        last = self.run_progress.last_step
        if last < self._answers[0].step:  # rank 0 died with its work done, and its last lines with it
            self._run_log.record(self._fetch_copies(last))

    def _fetch_copies(self, step: int) -> list[dict[str, Any]]:
        """Return the lines from `step` on, from the copies of the replicas that have completed them."""
        copies = copies_of(self._gang.control("lines_since", step - 1))
        # The first of several copies of a line is used; a step's validation comes after the step.
        return sorted(copies, key=lambda line: (line["step"], "split" in line))


def latest_checkpoint(storage: str | None, run_log: RunLog) -> Any:
    """Return the newest checkpoint whose checksums hold, or None; report newer ones that are damaged.

    Args:
        storage: location of the checkpoints; None: there are none.
        run_log: log of the run.
    """
    from orchestray.platform.run.checkpoint_files import damage_text, newest_checkpoint

    if storage is None:
        return None
    found, damage = newest_checkpoint(storage)
    for damaged in damage:
        run_log.writer.event("checkpoint_skipped", checkpoint=damaged.name, reason=damaged.reason)
        run_log.progress.warn(damage_text(damaged, found))
    return found
