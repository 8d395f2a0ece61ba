"""The driver of one training run: starts the gang, collects what it reports, replaces lost workers, records events.

It decides nothing about the algorithm, never imports torch, and is the only writer of the run directory. Only
checkpoints and the model are written by rank 0.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from orchestray.platform.actors import policies
from orchestray.platform.actors.death_cause import LOSSES, cause_of
from orchestray.platform.actors.gang import Gang, MemberLostError
from orchestray.platform.actors.member import Failure
from orchestray.platform.actors.pool import acquire, release
from orchestray.platform.errors import TrainingError
from orchestray.trainers.config.settings import ReplicaSettings, Start
from orchestray.trainers.core.outcome import PEER_LOST
from orchestray.trainers.driver.runlog.actors_file import ActorsFile
from orchestray.trainers.driver.runlog.kill_schedule import KillSchedule, described
from orchestray.trainers.driver.runlog.line_fetcher import LineFetcher, copies_of
from orchestray.trainers.driver.runlog.scaling import Scaling, scaled

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping

    from orchestray.platform.actors.placement import Shape
    from orchestray.platform.cluster.cluster import Cluster
    from orchestray.trainers.driver.runlog.run_log import RunLog

HOST = "orchestray.trainers.loop.host:ReplicaHost"
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
        self._max_restarts = max_restarts
        self._stop_sent = False
        self._announced = False
        self._resuming = checkpoint is not None
        self._kills = KillSchedule(settings.faults, shape.role)
        self._scaled_at: int | None = None
        """Step after which the number of replicas was changed; None once they have met again."""

    def run(self) -> Any:
        """Train to the end; return the replicas' `Outcome`.

        Raises:
            OrchestrayError: the run failed; its text says what the user can do.
        """
        gang = acquire(self._cluster, self._shape, self._progress.event)
        self._run_log.fetch_copies = lambda step: self._fetch_copies(gang, step)
        self._actors_file = ActorsFile(self._writer, [gang])
        gang.while_waiting = self._actors_file.write
        self._scaling = Scaling(self._run_log, gang, HOST, self._stop)
        finished = False
        try:
            outcome = self._train_until_done(gang)
            finished = True
        finally:
            self._scaling.close()
            if finished:
                release(gang)
            else:
                gang.close()
            self._writer.actors([])
        return outcome

    def _train_until_done(self, gang: Gang) -> Any:
        hosted = False
        while True:
            try:
                if not hosted:
                    gang.host(HOST, self._settings)
                    hosted = True
                if not self._announced:
                    self._announce(gang)
                gang.meet()
                if self._scaled_at is not None:
                    self._scaling.done(self._scaled_at)
                    self._scaled_at = None
                outcome = self._train(gang)
                if not self._scale(gang, outcome):
                    return outcome
                hosted = False
            except MemberLostError as loss:
                self._recover(gang, loss.lost)

    def _announce(self, gang: Gang) -> None:
        # The call is queued behind the building of the host: the member may have just replaced a lost one.
        sizes = gang.gather_one(gang.call_one(0, "describe"), 0)
        self._run_log.announce(sizes, self._settings.batch_size, resumed=self._resuming, workers=len(gang.slots))
        self._announced = True
        self._actors_file.announce()

    # -- one attempt ---------------------------------------------------------------------------------------------------

    def _train(self, gang: Gang) -> Any:
        start = Start(self.run_progress.started_at, self._checkpoint, attempt=self._kills.num_over())
        rank_of = {reference: rank for rank, reference in enumerate(gang.call("train", start))}
        answers: dict[int, Any] = {}
        lost: dict[int, str] = {}
        broken = False
        settle_by_s: float | None = None
        while rank_of:
            # Not in a broken attempt: requests to a dead rank 0 fail at once, again and again.
            asked = [] if broken else [self._ask_lines(gang)]
            ready, _ = ray.wait([*rank_of, *asked], num_returns=1, timeout=_LISTEN_S)
            self._writer.raise_if_failed()
            for reference in ready:
                if reference in asked:
                    self._line_fetcher.take()
                else:
                    self._settle(rank_of.pop(reference), reference, answers, lost)
            if self.run_progress.lost_at_s is None:
                gang.refill_spares()
                if self._is_under_way():
                    gang.keep_reserve()
            self._actors_file.write()
            self._stop_if_asked(gang)
            broken = bool(lost) or any(answer == PEER_LOST for answer in answers.values())
            if broken and settle_by_s is None:
                settle_by_s = time.monotonic() + _SETTLE_TIMEOUT_S
                gang.control("abort")
            if settle_by_s is not None and time.monotonic() > settle_by_s:
                lost.update(dict.fromkeys(rank_of.values(), "it did not answer after another worker was lost"))
                break
        self._line_fetcher.take()
        return self._judge(gang, answers, lost)

    def _stop_if_asked(self, gang: Gang) -> None:
        """Have the replicas stop with a checkpoint: for good, or to continue in another number."""
        change = self._scaling.ready(self._settings)
        if (self._stop.is_set() or change is not None) and not self._stop_sent:
            self._stop_sent = True
            gang.control("request_stop")

    def _scale(self, gang: Gang, outcome: Any) -> bool:
        """Change the gang if the replicas have stopped only to continue in another number; return True if they
        continue.
        """
        if outcome.ended != "interrupted" or self._stop.is_set():
            return False
        self._stop_sent = False
        change = self._scaling.ready(self._settings)
        if change is None:  # it was given up meanwhile: the replicas continue as they were
            return True
        self._settings = scaled(self._settings, change)
        if change.grows:
            gang.adopt()
        else:
            gang.shrink(self._settings.layout.size)
        self._scaled_at = outcome.step
        self._actors_file.write()
        return True

    def _is_under_way(self) -> bool:
        """Return True if steps have run for a while, so that starting a process delays neither the first step nor a
        short run.
        """
        first_s = self.run_progress.first_step_s
        return first_s is not None and self.run_progress.now_s() - first_s > _RESERVE_AFTER_S

    def _judge(self, gang: Gang, answers: Mapping[int, Any], lost: dict[int, str]) -> Any:
        failures = [(rank, answer) for rank, answer in sorted(answers.items()) if isinstance(answer, Failure)]
        if failures:
            rank, failure = failures[0]
            self._writer.event("worker_failed", role=self._shape.role, rank=rank, traceback=failure.traceback)
            raise failure.error
        if lost or any(answer == PEER_LOST for answer in answers.values()):
            raise MemberLostError(lost)
        more = True
        while more:
            self._ask_lines(gang, timeout_s=0.0)
            more = self._line_fetcher.take()
        if self.run_progress.last_step < answers[0].step:  # rank 0 died with its work done, and its last lines with it
            self._run_log.record(self._fetch_copies(gang, self.run_progress.last_step))
        return answers[0]

    def _settle(self, rank: int, reference: Any, answers: dict[int, Any], lost: dict[int, str]) -> None:
        try:
            answers[rank] = ray.get(reference)
        except LOSSES as error:
            lost[rank] = cause_of(error)
            self.run_progress.lost_at_s = self.run_progress.lost_at_s or self.run_progress.now_s()
        except RayError as error:
            raise TrainingError(f"Worker {rank} failed: {str(error).strip().splitlines()[-1]}") from error

    # -- recovery ------------------------------------------------------------------------------------------------------

    def _recover(self, gang: Gang, lost: dict[int, str]) -> None:
        for rank, cause in sorted(lost.items()):
            self._writer.event("worker_lost", role=self._shape.role, rank=rank, cause=cause)
            self._progress.event(f"worker {rank} lost: {cause}")
        for kill in self._kills.lost(lost):
            self._writer.event("fault", **described(kill))
        causes = lost or {0: "the workers lost touch with each other"}
        decision = policies.after_loss(causes, restarts=self.run_progress.restarts, max_restarts=self._max_restarts)
        if isinstance(decision, policies.GiveUp):
            raise TrainingError(decision.reason)
        self.run_progress.restarts += 1
        self._progress.set_restarts(self.run_progress.restarts)
        self.run_progress.lost_at_s = self.run_progress.lost_at_s or self.run_progress.now_s()
        self._stop_sent = False
        for rank in sorted(lost):
            from_spare = gang.replace(rank)
            self._writer.event("worker_replaced", role=self._shape.role, rank=rank, spare=from_spare)
        self._actors_file.write()

    def _fetch_copies(self, gang: Gang, step: int) -> list[dict[str, Any]]:
        """Return the lines from `step` on, from the copies of the replicas that have completed them."""
        copies = copies_of(gang.control("lines_since", step - 1))
        # The first of several copies of a line is used; a step's validation comes after the step.
        return sorted(copies, key=lambda line: (line["step"], "split" in line))

    # -- reports of the workers ----------------------------------------------------------------------------------------

    def _ask_lines(self, gang: Gang, timeout_s: float = _DRAIN_TIMEOUT_S) -> Any:
        written = self.run_progress.written_step
        return self._line_fetcher.ask(lambda: gang.control_one(0, "drain", timeout_s, _DRAIN_INTERVAL_S, written))


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
