"""The driver of a run under parameter servers: what happens to the gangs of servers and workers, and what is done.

It imports no torch. Unlike under a lock-step scheme, a worker that is lost is replaced while the others go on.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayError

from orchestray.platform import policies
from orchestray.platform.errors import TrainingError
from orchestray.platform.gang.gang import Gang, MemberLostError
from orchestray.platform.gang.member import Failure
from orchestray.platform.gang.placement import Shape
from orchestray.platform.gang.pool import acquire_all, release
from orchestray.platform.gang.seat import waiting
from orchestray.trainers.central.address import SERVER_LOST
from orchestray.trainers.central.crew import STAGE_HOST, WORKER_HOST, Crew, stopped_early
from orchestray.trainers.central.leaf_driver import LEAF_HOST, Leaves
from orchestray.trainers.central.lines import Lines
from orchestray.trainers.central.primaries import Primaries
from orchestray.trainers.central.resizing import Resizing
from orchestray.trainers.central.roster import Roster
from orchestray.trainers.central.usage import add_usage, usage_of, usage_of_the_living
from orchestray.trainers.driver.kills import Kills, described
from orchestray.trainers.driver.scaling import Scaling
from orchestray.trainers.replica.settings import Start

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from orchestray.platform.cluster.cluster import Cluster
    from orchestray.trainers.driver.story import Book
    from orchestray.trainers.replica.settings import ReplicaSettings

_SERVER_HOST = "orchestray.trainers.central.server_host:ServerHost"
_LISTEN_S = 0.5
_SETTLE_TIMEOUT_S = 120.0


class _ServersLostError(Exception):
    """A server without a copy is gone: all go on from the last checkpoint."""


class _DeadAtTheEndError(Exception):
    """A worker died after the last step, before it had told what it did, or written the model."""

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(rank, cause)
        self.rank, self.cause = rank, cause


class _NotDoneError(Exception):
    """The copy of a lost lead does not know that all is done, as its workers do."""


class CentralDriver:
    """Runs one training with servers and workers."""

    def __init__(
        self,
        settings: ReplicaSettings,
        shapes: Sequence[Shape],
        cluster: Cluster,
        book: Book,
        *,
        checkpoint: Any,
        max_restarts: int,
        stop: threading.Event,
    ) -> None:
        """
        Args:
            settings: what every process is told.
            shapes: of the gang of servers, of that of workers, and where there are leaf servers, of theirs.
            cluster: where.
            book: where what happens is written down.
            checkpoint: what to go on from at first, or None.
            max_restarts: recoveries before the run is given up.
            stop: set when the run shall end with a checkpoint.
        """
        self._settings = settings
        self._shapes = shapes
        self._cluster = cluster
        self._book = book
        self._writer, self._progress, self.story = book.writer, book.progress, book.story
        self._checkpoint = checkpoint
        self._resuming = checkpoint is not None
        self._max_restarts = max_restarts
        self._stop = stop
        self._stop_sent = False
        self._lead_is_new = False
        """Whether a copy took over from the lead, and has not been asked yet how the run ended."""
        self._announced = False
        self._num_beginnings = 0
        self._bytes_told_before = 0
        """By the lines of earlier attempts, which a checkpoint tells of."""
        self._kills = [
            fault for fault in settings.faults if fault["kind"] == "kill" and fault["role"] != shapes[1].role
        ]
        """Faults that are still to happen."""
        self._kills_of_workers = Kills(settings.faults, shapes[1].role, is_alone=True)

    def run(self) -> Any:
        """Train to the end; returns the `Outcome`.

        Raises:
            OrchestrayError: the run failed; what the user can do is in its text.
        """
        self._gangs = acquire_all(self._cluster, self._shapes, self._progress.event)
        finished = False
        try:
            outcome = self._run()
            finished = True
        finally:
            for gang in self._gangs:
                if finished:
                    release(gang)
                else:
                    gang.close()
            self._writer.actors([])
        return outcome

    def _run(self) -> Any:
        self._servers, self._workers = self._gangs[:2]
        self._roster = Roster(self._writer, [self._workers, self._servers, *self._gangs[2:]])
        self._leaves = Leaves(self._gangs[2], self._lose, self._replaced) if len(self._gangs) > 2 else None
        size = self._settings.layout.model_size
        self._worker_host = WORKER_HOST if size == 1 else STAGE_HOST
        self._shards = int(self._settings.exchange["shards"])
        self._primaries = Primaries(self._servers, self._shards)
        self._crew = Crew(self._workers, size, self._primaries, self._leaves, attempt=self._kills_of_workers.num_over)
        self._lines = Lines(self._primaries, self._book)
        self._book.fetch_copies = self._lines.copies
        scaling = Scaling(self._book, self._workers, self._worker_host, self._stop)
        hands_over = self._settings.has_residue and self._leaves is None
        self._resizing = Resizing(
            self._workers,
            scaling,
            self.story,
            employ=self._crew.employ,
            cut=lambda replicas: self._primaries.ask_lead("resize", replicas),
            expel=lambda replica: self._primaries.ask_lead("expel", replica),
            dismiss=(lambda replica: self._primaries.ask_lead("dismiss", replica)) if hands_over else None,
            size=size,
        )
        for gang in self._gangs:
            gang.while_waiting = self._roster.write
        try:
            return self._train_until_done()
        finally:
            scaling.close()

    def _train_until_done(self) -> Any:
        hosts = (_SERVER_HOST, self._worker_host, LEAF_HOST)
        building = [
            (gang, gang.begin_host(host, self._settings)) for gang, host in zip(self._gangs, hosts, strict=False)
        ]
        for gang, references in building:
            self._gather(gang, references)
        while True:
            try:
                self._begin()
                return self._train()
            except _ServersLostError:
                continue

    def _gather(self, gang: Gang, references: list[Any]) -> list[Any]:
        """As `Gang.gather`; a member that dies while it is built is replaced."""
        while True:
            try:
                return gang.gather(references)
            except MemberLostError as loss:
                for rank, cause in sorted(loss.lost.items()):
                    self._lose(gang, rank, cause)
                    gang.replace(rank)
                references = [gang.control_one(rank, "usage") for rank in range(len(gang.seats))]

    def _begin(self) -> None:
        """Have the servers serve from the newest checkpoint there is."""
        if self._num_beginnings == 0 and self._settings.model_directory:
            # Logs of an earlier session: it may have had other settings, and the metric lines end at the checkpoint.
            shutil.rmtree(Path(self._settings.model_directory).parent / "servers", ignore_errors=True)
        self._bytes_told_before = self._book.bytes_told
        start = Start(self.story.started_at, self._checkpoint, self._num_beginnings)
        self._num_beginnings += 1
        if self._crew.size > 1 and self._crew.plan is None:
            self._crew.plan = self._plan()
        try:
            self._primaries.begin(start, self._crew.plan)
            if not self._announced:
                self._announce()
        except MemberLostError as loss:
            self._recover_servers(loss.lost)
            raise _ServersLostError from loss
        self._resizing.tell_lead()
        if self._leaves is not None:
            try:
                self._leaves.begin(start, self.story.total_steps, self._primaries.expect)
            except (ConnectionError, TimeoutError) as error:  # of channels: a server died meanwhile
                raise _ServersLostError from error

    def _plan(self) -> Any:
        """Where a worker says that the network is to be cut, for the whole run: servers hold what is on either side."""
        while True:
            try:
                return self._workers.gather_one(self._workers.call_one(0, "plan"), 0)
            except MemberLostError as loss:
                self._lose(self._workers, 0, loss.lost[0])
                self._put_another(0)

    def _announce(self) -> None:
        sizes = self._servers.gather([self._primaries.ask_lead("describe")])[0]
        self.story.total_steps = sizes["total_steps"]
        self._progress.set_total(sizes["total_steps"])
        if sizes["samples"] < self._settings.batch_size:
            self._progress.event(
                f"warning: the data has {sizes['samples']} samples, fewer than one batch of "
                f"{self._settings.batch_size}: each step uses all of them."
            )
        self._roster.write()
        self._writer.event(
            "resumed" if self._resuming else "started",
            **sizes,
            workers=len(self._workers.seats),
            parameter_servers=len(self._servers.seats),
        )
        self._announced = True
        self._roster.announce()

    # -- one attempt -------------------------------------------------------------------------------------------------

    def _train(self) -> Any:
        self._stop_sent = False
        self._resizing.see_off({})
        self._crew.begin()
        self._primaries.watch()
        while True:
            self._work()
            try:
                return self._finish()
            except _DeadAtTheEndError as loss:  # its successor learns from the servers that all is done
                self._lose(self._workers, loss.rank, loss.cause)
                self._put_another(loss.rank)
                self._crew.employ(loss.rank // self._crew.size)
            except _NotDoneError:  # they ask it what is left
                self._crew.begin()

    def _work(self) -> None:
        """Until no worker works any more."""
        crew, primaries = self._crew, self._primaries
        while crew.working:
            asked = self._lines.ask(hasty=bool(self._kills))
            watched = [*crew.working, *primaries.ends.values(), *primaries.building, asked]
            ready, _ = ray.wait(watched, num_returns=1, timeout=_LISTEN_S)
            self._writer.raise_if_failed()
            for reference in ready:
                if reference == asked:
                    self._take()
                elif reference in primaries.building:
                    primaries.go_on_building(reference)
                elif reference in crew.working:
                    self._hear(crew.working.pop(reference), reference)
            if lost := primaries.lost():
                self._on_servers_lost(lost)
                primaries.watch()
                self._take()  # of the lost lead: what it has answered comes before what its copy says
            self._mend()
            self._workers.check_places()
            self._roster.write()
            if self.story.lost_at_s is None:
                self._workers.refill_spares()
            self._resizing.look(self._settings, crew.working)
            if self._stop.is_set() and not self._stop_sent:
                self._stop_sent = True
                primaries.ask_lead("request_stop")
        self._resizing.see_off(crew.working)
        self._take()

    def _hear(self, rank: int, reference: Any) -> None:
        """A worker has answered, or is lost."""
        if rank in self._resizing.leaving:
            self._resizing.depart(rank)
            return
        answer = self._settle(rank, reference)
        if answer == SERVER_LOST:  # its connection ends before the process's end is known
            ended, _ = ray.wait(list(self._primaries.ends.values()), num_returns=1, timeout=_LISTEN_S)
            self._crew.lost_touch(rank, self.story.last_step, is_explained=bool(ended))
        if stopped_early(answer):
            self._crew.stopped(rank, answer)

    def _mend(self) -> None:
        """Set replicas to work again that have stopped, once none of their workers is busy any more."""
        for replica, known in self._crew.to_mend().items():
            first = replica * self._crew.size
            if first in self._resizing.leaving:
                continue
            if not known:
                self._count({first: "the stages of a replica lost touch with each other"})
            self._crew.employ(replica)

    def _replaced(self, gang: Gang, rank: int, *, spare: bool = False) -> None:
        """Another process is in the place of a lost one."""
        self._writer.event("worker_replaced", role=gang.shape.role, rank=rank, spare=spare)
        self._roster.write()

    def _settle(self, rank: int, reference: Any) -> str | None:
        """A worker's answer; None if it was lost, and another one is in its place."""
        try:
            answer = ray.get(reference)
        except RayActorError as error:
            self.story.lost_at_s = self.story.lost_at_s or self.story.now_s()
            self._lose(self._workers, rank, self._workers.cause(rank, error))
            self._put_another(rank)
            return None
        except RayError as error:
            raise TrainingError(f"Worker {rank} failed: {str(error).strip().splitlines()[-1]}") from error
        if isinstance(answer, Failure):
            self._writer.event("worker_failed", role="worker", rank=rank, traceback=answer.traceback)
            raise answer.error
        return str(answer)

    def _put_another(self, rank: int) -> None:
        """Another process in the place of a worker."""
        self._replaced(self._workers, rank, spare=self._workers.replace(rank))

    def _on_servers_lost(self, lost: dict[int, str]) -> None:
        """Have copies take over; where a shard has none, stop everybody, and go on from the last checkpoint."""
        self.story.lost_at_s = self.story.lost_at_s or self.story.now_s()
        taken_over = [self._take_over(rank, lost) for rank in sorted(lost) if self._primaries.serves(rank)]
        if all(taken_over):
            if taken_over:  # lines that nobody had fetched from the lost lead; its copy has noted the same
                self._book.record(self._lines.copies(self.story.last_step), copies=True)
            self._recover_servers(lost)
            self._primaries.build_copies(sorted(lost))
            return
        self._crew.abort()
        for gang in (*self._gangs[2:], self._servers):
            gang.control("abort")
        waiting = list(self._crew.working)
        _, late = ray.wait(waiting, num_returns=len(waiting), timeout=_SETTLE_TIMEOUT_S) if waiting else ([], [])
        for still in late:
            rank = self._crew.working[still]
            self._lose(self._workers, rank, "it did not answer after a server was lost")
            self._workers.replace(rank)
        self._recover_servers(lost)
        raise _ServersLostError

    def _take_over(self, rank: int, lost: dict[int, str]) -> bool:
        """Have a copy of a lost server serve in its place; returns whether there is one."""
        copy = self._primaries.take_over(rank, lost, self._crew.reroute)
        if copy is None:
            return False
        self._lead_is_new |= copy == self._primaries.lead
        self._resizing.tell_lead()
        self._writer.event("server_taken_over", role="parameter_server", rank=copy, shard=rank % self._shards)
        return True

    def _recover_servers(self, lost: dict[int, str]) -> None:
        for rank, cause in sorted(lost.items()):
            self._lose(self._servers, rank, cause)
            self._servers.replace(rank)
            self._replaced(self._servers, rank)

    def _lose(self, gang: Gang, rank: int, cause: str) -> None:
        """Write down a loss, and see whether the run may go on after it."""
        self._note_loss(gang, rank, cause)
        if gang is self._workers:
            for kill in self._kills_of_workers.lost([rank]):
                self._writer.event("fault", **described(kill))
        self._count({rank: cause}, gang.shape.role)

    def _note_loss(self, gang: Gang, rank: int, cause: str) -> None:
        role = gang.shape.role
        self._writer.event("worker_lost", role=role, rank=rank, cause=cause)
        self._progress.event(f"{role.replace('_', ' ')} {rank} lost: {cause}")

    def _count(self, causes: dict[int, str], role: str = "worker") -> None:
        """See whether the run may go on after a loss."""
        restarts, most = self.story.restarts, self._max_restarts
        decision = policies.after_loss(causes, restarts=restarts, max_restarts=most, role=role)
        if isinstance(decision, policies.GiveUp):
            raise TrainingError(decision.reason)
        self.story.restarts += 1
        self._progress.set_restarts(self.story.restarts)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _finish(self) -> Any:
        """What has come out.

        Raises:
            _DeadAtTheEndError: a worker was lost.
            _NotDoneError: something is left to do.
            _ServersLostError: a server was lost that has no copy.
        """
        more = True
        while more:
            self._lines.ask(timeout_s=0.0)
            more = self._take()
        lead = self._primaries.lead
        try:
            outcome = self._servers.gather_one(self._servers.call_one(lead, "outcome"), lead)
            of_servers = usage_of(self._servers)
        except MemberLostError as loss:
            self._on_servers_lost(loss.lost)
            self._primaries.watch()
            return self._finish()
        if outcome.ended == "interrupted" and self._lead_is_new and not self._stop.is_set():
            self._lead_is_new = False
            raise _NotDoneError
        try:
            of_workers = usage_of(self._workers)
            if outcome.ended != "interrupted":
                self._crew.save_model(outcome.step)
        except MemberLostError as loss:
            raise _DeadAtTheEndError(*min(loss.lost.items())) from loss
        present = [{**one, **self._crew.place_of(one["rank"])} for one in of_workers]
        workers = [*present, *self._resizing.departed]
        of_leaves = [one for gang in self._gangs[2:] for one in usage_of_the_living(gang, self._note_loss)]
        bytes_told = self._book.bytes_told - self._bytes_told_before
        add_usage(outcome, workers, [*of_servers, *of_leaves], bytes_told=bytes_told)
        return outcome

    # -- what the lead says ------------------------------------------------------------------------------------------

    def _take(self) -> bool:
        """As `Lines.take`; what was to be done at a step that has come is done."""
        found = self._lines.take()
        self._kill_as_asked()
        return found

    def _kill_as_asked(self) -> None:
        """Do the kills of servers among the run's faults; a worker does its own (`trainers.faults`)."""
        for fault in self._kills:
            gang = next((gang for gang in self._gangs if gang.shape.role == fault["role"]), None)
            if gang is not None and self.story.last_step >= fault["at_step"]:
                self._kills.remove(fault)
                self._writer.event("fault", **described(fault))
                seat = gang.seats[fault["rank"]]
                end = seat.end or waiting(seat).end
                ray.kill(seat.actor)
                ray.wait([end], timeout=_SETTLE_TIMEOUT_S)  # it must not answer what is asked of it after this
                return
