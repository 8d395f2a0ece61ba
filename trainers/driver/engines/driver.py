"""The driver of a run of replicas in step: waits for what happens to the gang, and does what the controller decides.

It decides nothing about the algorithm, never imports torch, and is the only writer of the run directory. Only
checkpoints and the model are written by rank 0.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from orchestray.platform.actors.death_cause import LOSSES
from orchestray.platform.actors.gang import MemberLostError
from orchestray.platform.actors.member import Failure
from orchestray.platform.actors.pool import acquire, release
from orchestray.platform.errors import TrainingError
from orchestray.trainers.config.settings import ReplicaSettings, Start
from orchestray.trainers.core.outcome import PEER_LOST
from orchestray.trainers.driver.control import controller
from orchestray.trainers.driver.control.losses import Losses
from orchestray.trainers.driver.runlog.actors_file import ActorsFile
from orchestray.trainers.driver.runlog.kill_schedule import KillSchedule
from orchestray.trainers.driver.runlog.line_fetcher import LineFetcher, copies_of
from orchestray.trainers.driver.runlog.scaling import Scaling, scaled

if TYPE_CHECKING:
    import threading

    from orchestray.platform.actors.placement import Shape
    from orchestray.platform.cluster.cluster import Cluster
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

    def __init__(
        self,
        settings: ReplicaSettings,
        shape: Shape,
        cluster: Cluster,
        run_log: RunLog,
        *,
        checkpoint: Any,
        max_restarts: int,
        hang_timeout_s: float | None,
        stop: threading.Event,
    ) -> None:
        """
        Args:
            settings: settings of every replica.
            shape: shape of the gang to form.
            cluster: cluster to run on.
            run_log: log of the run; its progress includes that from before a resumption.
            checkpoint: checkpoint to continue from at first (`platform.run.checkpoint.Found`), or None.
            max_restarts: number of recoveries after which the run is given up.
            hang_timeout_s: seconds for which a worker may not answer; None: for ever.
            stop: set when the run is to end with a checkpoint.
        """
        self._stop = stop
        self._settings = settings
        self._shape = shape
        self._cluster = cluster
        self._run_log = run_log
        self._writer = run_log.writer
        self._progress = run_log.progress
        self._line_fetcher = LineFetcher(run_log)
        self.run_progress = run_log.run_progress
        self._checkpoint = checkpoint
        self._max_restarts, self._hang_timeout_s = max_restarts, hang_timeout_s
        self._stop_sent = False
        self._hosted = self._announced = False
        self._resuming = checkpoint is not None
        self._kills = KillSchedule(settings.faults, shape.role)
        self._losses = Losses(run_log, self._kills, shape.role)
        self._scaled_at: int | None = None
        """Step after which the number of replicas was changed; None once they have met again."""
        self._rank_of: dict[Any, int] = {}
        """Ranks of the workers that train, by the references of their answers."""
        self._answers: dict[int, Any] = {}
        self._settle_by_s: float | None = None
        self._outcome: Any = None
        self._state = controller.State({}, 1, max_restarts)

    def run(self) -> Any:
        """Train to the end; return the replicas' `Outcome`.

        Raises:
            OrchestrayError: the run failed; its text says what the user can do.
        """
        self._gang = gang = acquire(self._cluster, self._shape, self._progress.event)
        self._run_log.fetch_copies = self._fetch_copies
        self._actors_file = ActorsFile(self._writer, [gang])
        gang.while_waiting = self._actors_file.write
        gang.hang_timeout_s = self._hang_timeout_s
        self._scaling = Scaling(self._run_log, gang, HOST, self._stop)
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
        events = self._begin()
        while True:
            for event in events:
                self._state, decisions = controller.step(self._state, event)
                if any(not isinstance(decision, controller.Abort) for decision in decisions):
                    self._line_fetcher.take()  # lines of the attempt that is over
                for decision in decisions:
                    self._act(decision)
            if self._outcome is not None:
                return
            events = self._wait() if self._rank_of else self._begin()

    # -- what the controller decides -----------------------------------------------------------------------------------

    def _act(self, decision: controller.Decision) -> None:
        """Carry out a decision; `Employ` is carried out once all others are."""
        match decision:
            case controller.Abort() if self._rank_of:
                self._settle_by_s = time.monotonic() + _SETTLE_TIMEOUT_S
                self._gang.control("abort")
            case controller.Record(causes):
                self._losses.begin()
                self._losses.record(self._shape.role, causes)
            case controller.Replace(rank):
                self._losses.replaced(self._shape.role, rank, spare=self._gang.replace(rank))
                self._actors_file.write()
            case controller.Employ():
                self._recover()
            case controller.Fail(rank):
                failure = self._answers[rank]
                self._writer.event("worker_failed", role=self._shape.role, rank=rank, traceback=failure.traceback)
                raise failure.error
            case controller.GiveUp(reason):
                raise TrainingError(reason)
            case controller.Finish():
                self._finish()

    def _recover(self) -> None:
        """Show that the run recovers."""
        self._rank_of.clear()
        self._stop_sent = False
        self._losses.begin()
        self._losses.show(self._state.restarts)

    def _begin(self) -> list[controller.Event]:
        """Have all workers meet and train; return the losses if that fails."""
        gang, progress = self._gang, self.run_progress
        size = len(gang.slots)
        self._state = controller.State.of(size, size, max_restarts=self._max_restarts, restarts=progress.restarts)
        self._state = self._state.employed(_ALL)
        self._answers, self._settle_by_s = {}, None
        try:
            if not self._hosted:
                gang.host(HOST, self._settings)
                self._hosted = True
            if not self._announced:
                self._announce()
            gang.meet()
        except MemberLostError as loss:
            others = (rank for rank in range(size) if rank not in loss.lost)
            lost: list[controller.Event] = [controller.Lost(rank, cause) for rank, cause in loss.lost.items()]
            return [*lost, *(controller.StoppedEarly(rank, explained=False) for rank in others)]
        if self._scaled_at is not None:
            self._scaling.done(self._scaled_at)
            self._scaled_at = None
        start = Start(progress.started_at, self._checkpoint, attempt=self._kills.num_over())
        self._rank_of = {reference: rank for rank, reference in enumerate(gang.call("train", start))}
        return []

    def _announce(self) -> None:
        # The call is queued behind the building of the host: the member may have just replaced a lost one.
        sizes = self._gang.gather_one(self._gang.call_one(0, "describe"), 0)
        self._run_log.announce(sizes, self._settings.batch_size, resumed=self._resuming, workers=len(self._gang.slots))
        self._announced = True
        self._actors_file.announce()

    def _finish(self) -> None:
        """Keep the outcome, or change the gang if the replicas have stopped only to continue in another number."""
        self._fetch_rest()
        outcome = self._answers[0]
        if outcome.ended != "interrupted" or self._stop.is_set():
            self._outcome = outcome
            return
        self._rank_of.clear()
        self._stop_sent = self._hosted = False
        change = self._scaling.ready(self._settings)
        if change is None:  # it was given up meanwhile: the replicas continue as they were
            return
        self._settings = scaled(self._settings, change)
        if change.grows:
            self._gang.adopt()
        else:
            self._gang.shrink(self._settings.layout.size)
        self._scaled_at = outcome.step
        self._actors_file.write()

    # -- what happens --------------------------------------------------------------------------------------------------

    def _wait(self) -> list[controller.Event]:
        """Wait for answers, losses and lines, for a while; return what the controller has to know."""
        gang, progress = self._gang, self.run_progress
        is_stopping = self._settle_by_s is not None
        # Not when stopping: requests to a dead rank 0 fail at once, again and again.
        asked = [] if is_stopping else [self._ask_lines()]
        ready, _ = ray.wait([*self._rank_of, *asked], num_returns=1, timeout=_LISTEN_S)
        self._writer.raise_if_failed()
        events: list[controller.Event] = []
        for reference in ready:
            if reference in asked:
                self._line_fetcher.take()
            else:
                events.append(self._answered(self._rank_of.pop(reference), reference))
        if progress.lost_at_s is None:
            gang.refill_spares()
            if self._is_under_way():
                gang.keep_reserve()
        gang.check_places()
        self._actors_file.write()
        self._stop_if_asked()
        if self._settle_by_s is not None and time.monotonic() > self._settle_by_s:
            self._rank_of.clear()
            events.append(controller.TimeUp(_ALL))
        return events

    def _answered(self, rank: int, reference: Any) -> controller.Event:
        try:
            answer = self._answers[rank] = ray.get(reference)
        except LOSSES as error:
            self._losses.begin()
            return controller.Lost(rank, self._gang.cause(rank, error))
        except RayError as error:
            raise TrainingError(f"Worker {rank} failed: {str(error).strip().splitlines()[-1]}") from error
        if isinstance(answer, Failure):
            return controller.Failed(rank)
        return controller.StoppedEarly(rank, explained=False) if answer == PEER_LOST else controller.Done(rank)

    def _is_under_way(self) -> bool:
        """Return True if steps have run for a while, so that starting a process delays neither the first step nor a
        short run.
        """
        first_s = self.run_progress.first_step_s
        return first_s is not None and self.run_progress.now_s() - first_s > _RESERVE_AFTER_S

    def _stop_if_asked(self) -> None:
        """Have the replicas stop with a checkpoint: for good, or to continue in another number."""
        change = self._scaling.ready(self._settings)
        if (self._stop.is_set() or change is not None) and not self._stop_sent:
            self._stop_sent = True
            self._gang.control("request_stop")

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
