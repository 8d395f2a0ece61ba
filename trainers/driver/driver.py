"""The driver of one training run: starts the gang, listens to it, replaces what dies, writes down what happens.

It decides nothing about the algorithm, never imports torch, and is the only writer of the run directory (checkpoints
and the model are written by rank 0).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayError

from orchestray.platform import policies
from orchestray.platform.errors import TrainingError
from orchestray.platform.gang.causes import cause_of
from orchestray.platform.gang.gang import Gang, MemberLostError
from orchestray.platform.gang.member import Failure
from orchestray.platform.gang.pool import acquire, release
from orchestray.trainers.driver.fetching import Inquiry, copies_of
from orchestray.trainers.driver.kills import Kills, described
from orchestray.trainers.driver.scaling import Scaling, scaled
from orchestray.trainers.replica.settings import ReplicaSettings, Start

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping

    from orchestray.platform.cluster.cluster import Cluster
    from orchestray.platform.gang.placement import Shape
    from orchestray.platform.run.progress import Progress
    from orchestray.trainers.driver.story import Book

HOST = "orchestray.trainers.replica.host:ReplicaHost"
PEER_LOST = "peer_lost"
_LISTEN_S = 0.5
_DRAIN_INTERVAL_S = 0.1
_DRAIN_TIMEOUT_S = 0.3
_RESERVE_AFTER_S = 5.0
_SETTLE_TIMEOUT_S = 120.0
"""How long a survivor may go on computing before it notices that another worker is gone."""


class Driver:
    """Runs one training with a gang of replicas."""

    def __init__(
        self,
        settings: ReplicaSettings,
        shape: Shape,
        cluster: Cluster,
        book: Book,
        *,
        checkpoint: Any,
        max_restarts: int,
        stop: threading.Event,
    ) -> None:
        """
        Args:
            settings: what every replica is told.
            shape: the gang to form.
            cluster: where.
            book: where what happens is written down; its story says what happened before, for a resumed run.
            checkpoint: what to go on from at first (`platform.run.checkpoint.Found`), or None.
            max_restarts: recoveries before the run is given up.
            stop: set when the run shall end with a checkpoint.
        """
        self._stop = stop
        self._settings = settings
        self._shape = shape
        self._cluster = cluster
        self._book = book
        self._writer = book.writer
        self._progress = book.progress
        self._inquiry = Inquiry(book)
        self.story = book.story
        self._checkpoint = checkpoint
        self._max_restarts = max_restarts
        self._stop_sent = False
        self._actors: list[dict[str, Any]] = []
        self._announced = False
        self._resuming = checkpoint is not None
        self._kills = Kills(settings.faults, shape.role)
        self._scaled_at: int | None = None
        """The step after which the number of replicas was changed, until they have met again."""

    def run(self) -> Any:
        """Train to the end; returns the replicas' `Outcome`.

        Raises:
            OrchestrayError: the run failed; what the user can do is in its text.
        """
        gang = acquire(self._cluster, self._shape, self._progress.event)
        self._book.fetch_copies = lambda step: self._fetch_copies(gang, step)
        gang.while_waiting = lambda: self._write_actors(gang)
        self._scaling = Scaling(self._book, gang, HOST, self._stop)
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
            self._actors = []
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
        # Behind what it builds: it may have just taken the place of a lost one.
        sizes = gang.gather_one(gang.call_one(0, "describe"), 0)
        self.story.total_steps = sizes["total_steps"]
        self._progress.set_total(sizes["total_steps"])
        if sizes["samples"] < self._settings.batch_size:
            self._progress.event(
                f"warning: the data has {sizes['samples']} samples, fewer than one batch of "
                f"{self._settings.batch_size}: each step uses all of them."
            )
        self._writer.event("resumed" if self._resuming else "started", **sizes, workers=len(gang.seats))
        self._announced = True
        self._tell_started(self._actors)

    # -- one attempt ---------------------------------------------------------------------------------------------------

    def _train(self, gang: Gang) -> Any:
        start = Start(self.story.started_at, self._checkpoint, attempt=self._kills.num_over())
        rank_of = {reference: rank for rank, reference in enumerate(gang.call("train", start))}
        answers: dict[int, Any] = {}
        lost: dict[int, str] = {}
        broken = False
        settle_by_s: float | None = None
        while rank_of:
            # Not once the attempt is broken: a dead rank 0 answers at once, again and again.
            asked = [] if broken else [self._ask_lines(gang)]
            ready, _ = ray.wait([*rank_of, *asked], num_returns=1, timeout=_LISTEN_S)
            self._writer.raise_if_failed()
            for reference in ready:
                if reference in asked:
                    self._inquiry.take()
                else:
                    self._settle(rank_of.pop(reference), reference, answers, lost)
            if self.story.lost_at_s is None:
                gang.refill_spares()
                if self._is_under_way():
                    gang.keep_reserve()
            self._write_actors(gang)
            self._stop_if_asked(gang)
            broken = bool(lost) or any(answer == PEER_LOST for answer in answers.values())
            if broken and settle_by_s is None:
                settle_by_s = time.monotonic() + _SETTLE_TIMEOUT_S
                gang.control("abort")
            if settle_by_s is not None and time.monotonic() > settle_by_s:
                lost.update(dict.fromkeys(rank_of.values(), "it did not answer after another worker was lost"))
                break
        self._inquiry.take()
        return self._judge(gang, answers, lost)

    def _stop_if_asked(self, gang: Gang) -> None:
        """Have the replicas stop with a checkpoint: for good, or to go on in another number."""
        change = self._scaling.ready(self._settings)
        if (self._stop.is_set() or change is not None) and not self._stop_sent:
            self._stop_sent = True
            gang.control("request_stop")

    def _scale(self, gang: Gang, outcome: Any) -> bool:
        """Whether the replicas have stopped only to go on in another number; the gang is changed then."""
        if outcome.ended != "interrupted" or self._stop.is_set():
            return False
        self._stop_sent = False
        change = self._scaling.ready(self._settings)
        if change is None:  # it was given up meanwhile: they go on as they were
            return True
        self._settings = scaled(self._settings, change)
        if change.grows:
            gang.adopt()
        else:
            gang.shrink(self._settings.layout.size)
        self._scaled_at = outcome.step
        self._write_actors(gang)
        return True

    def _is_under_way(self) -> bool:
        """Whether the steps have run for a while: a process started now delays neither the first nor a short run."""
        first_s = self.story.first_step_s
        return first_s is not None and self.story.now_s() - first_s > _RESERVE_AFTER_S

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
            more = self._inquiry.take()
        if self.story.last_step < answers[0].step:  # rank 0 died with its work done, and its last lines with it
            self._book.record(self._fetch_copies(gang, self.story.last_step))
        return answers[0]

    def _settle(self, rank: int, reference: Any, answers: dict[int, Any], lost: dict[int, str]) -> None:
        try:
            answers[rank] = ray.get(reference)
        except RayActorError as error:
            lost[rank] = cause_of(error)
            self.story.lost_at_s = self.story.lost_at_s or self.story.now_s()
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
        decision = policies.after_loss(causes, restarts=self.story.restarts, max_restarts=self._max_restarts)
        if isinstance(decision, policies.GiveUp):
            raise TrainingError(decision.reason)
        self.story.restarts += 1
        self._progress.set_restarts(self.story.restarts)
        self.story.lost_at_s = self.story.lost_at_s or self.story.now_s()
        self._stop_sent = False
        for rank in sorted(lost):
            from_spare = gang.replace(rank)
            self._writer.event("worker_replaced", role=self._shape.role, rank=rank, spare=from_spare)
        self._write_actors(gang)

    def _fetch_copies(self, gang: Gang, step: int) -> list[dict[str, Any]]:
        """Lines from `step` on, as the replicas that have completed them remember them."""
        copies = copies_of(gang.control("lines_since", step - 1))
        # Of several copies of a line the first is taken; a step's validation comes after the step.
        return sorted(copies, key=lambda line: (line["step"], "split" in line))

    # -- what the workers say ------------------------------------------------------------------------------------------

    def _ask_lines(self, gang: Gang, timeout_s: float = _DRAIN_TIMEOUT_S) -> Any:
        written = self.story.written_step
        return self._inquiry.ask(lambda: gang.control_one(0, "drain", timeout_s, _DRAIN_INTERVAL_S, written))

    def _write_actors(self, gang: Gang) -> None:
        """Keep `actors.json` current, and say of each new process that it is there."""
        actors: list[dict[str, Any]] = [
            {"role": role, "rank": rank, "pid": identity.pid, "node": identity.node}
            for role, rank, identity in gang.identify()
        ]
        if actors == self._actors:
            return
        before, self._actors = self._actors, actors
        self._writer.actors(actors)
        if self._announced:
            self._tell_started([actor for actor in actors if actor not in before])

    def _tell_started(self, actors: list[dict[str, Any]]) -> None:
        for actor in actors:
            self._writer.event("worker_started", **actor)


def latest_checkpoint(storage: str | None, progress: Progress) -> Any:
    """The newest checkpoint whose checksums hold, saying which newer ones are damaged; None if there is none."""
    from orchestray.platform.run.checkpoint import latest_good

    if storage is None:
        return None
    found, warnings = latest_good(storage)
    for warning in warnings:
        progress.event(f"warning: {warning}")
    return found
