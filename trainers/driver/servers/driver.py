"""The driver of a run under parameter servers: the events in the gangs of servers and workers, and the reactions to
them.

It imports no torch. Unlike under a lock-step scheme, a lost worker is replaced while the others go on.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from orchestray.platform.actors import policies
from orchestray.platform.actors.death_cause import LOSSES
from orchestray.platform.actors.gang import Gang, MemberLostError
from orchestray.platform.actors.member import Failure
from orchestray.platform.actors.placement import Shape
from orchestray.platform.actors.pool import acquire_all, release
from orchestray.platform.actors.slot import waiting
from orchestray.platform.errors import TrainingError
from orchestray.trainers.config.settings import Start
from orchestray.trainers.driver.runlog.actors_file import ActorsFile
from orchestray.trainers.driver.runlog.kill_schedule import KillSchedule, described
from orchestray.trainers.driver.runlog.scaling import Scaling
from orchestray.trainers.driver.servers.lead_lines import Lines
from orchestray.trainers.driver.servers.leaf_group import LEAF_HOST, Leaves
from orchestray.trainers.driver.servers.resizing import Resizing
from orchestray.trainers.driver.servers.server_group import ServerGroup
from orchestray.trainers.driver.servers.usage import add_usage, usage_of, usage_of_the_living
from orchestray.trainers.driver.servers.worker_group import STAGE_HOST, WORKER_HOST, WorkerGroup, stopped_early
from orchestray.trainers.ps.protocol.address import SERVER_LOST

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from orchestray.platform.cluster.cluster import Cluster
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.driver.runlog.run_log import RunLog

_SERVER_HOST = "orchestray.trainers.ps.hosts.server_host:ServerHost"
_LISTEN_S = 0.5
_SETTLE_TIMEOUT_S = 120.0


class _ServersLostError(Exception):
    """A server without a copy is lost: all continue from the last checkpoint."""


class _DeadAtTheEndError(Exception):
    """A worker died after the last step, before it had reported its usage or written the model."""

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(rank, cause)
        self.rank, self.cause = rank, cause


class _NotDoneError(Exception):
    """The copy of a lost lead does not know that the work is done; its workers do."""


class CentralDriver:
    """A driver of one training run with servers and workers."""

    def __init__(
        self,
        settings: ReplicaSettings,
        shapes: Sequence[Shape],
        cluster: Cluster,
        run_log: RunLog,
        *,
        checkpoint: Any,
        max_restarts: int,
        stop: threading.Event,
    ) -> None:
        """
        Args:
            settings: settings of every process.
            shapes: shapes of the gangs of servers, of workers and, if there are leaf servers, of leaf servers.
            cluster: cluster to run on.
            run_log: log of the run.
            checkpoint: checkpoint to continue from at first, or None.
            max_restarts: number of recoveries after which the run is given up.
            stop: set when the run is to end with a checkpoint.
        """
        self._settings = settings
        self._shapes = shapes
        self._cluster = cluster
        self._run_log = run_log
        self._writer, self._progress, self.run_progress = run_log.writer, run_log.progress, run_log.run_progress
        self._checkpoint = checkpoint
        self._resuming = checkpoint is not None
        self._max_restarts = max_restarts
        self._stop = stop
        self._stop_sent = False
        self._lead_is_new = False
        """True if a copy took over from the lead, and has not been asked yet how the run ended."""
        self._announced = False
        self._num_beginnings = 0
        self._bytes_reported_before = 0
        """Bytes in the lines of earlier attempts, which a checkpoint includes."""
        self._kills = [
            fault for fault in settings.faults if fault["kind"] == "kill" and fault["role"] != shapes[1].role
        ]
        """Faults that are still to happen."""
        self._kills_of_workers = KillSchedule(settings.faults, shapes[1].role, is_alone=True)

    def run(self) -> Any:
        """Train to the end; return the `Outcome`.

        Raises:
            OrchestrayError: the run failed; its text says what the user can do.
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
        self._actors_file = ActorsFile(self._writer, [self._workers, self._servers, *self._gangs[2:]])
        self._leaves = Leaves(self._gangs[2], self._lose, self._replaced) if len(self._gangs) > 2 else None
        size = self._settings.layout.model_size
        self._worker_host = WORKER_HOST if size == 1 else STAGE_HOST
        self._shards = int(self._settings.exchange["shards"])
        self._primaries = ServerGroup(self._servers, self._shards)
        self._worker_group = WorkerGroup(
            self._workers, size, self._primaries, self._leaves, attempt=self._kills_of_workers.num_over
        )
        self._lines = Lines(self._primaries, self._run_log)
        self._run_log.fetch_copies = self._lines.copies
        scaling = Scaling(self._run_log, self._workers, self._worker_host, self._stop)
        hands_over = self._settings.has_residual and self._leaves is None
        self._resizing = Resizing(
            self._workers,
            scaling,
            self.run_progress,
            employ=self._worker_group.employ,
            cut=lambda replicas: self._primaries.ask_lead("resize", replicas),
            expel=lambda replica: self._primaries.ask_lead("expel", replica),
            dismiss=(lambda replica: self._primaries.ask_lead("dismiss", replica)) if hands_over else None,
            size=size,
        )
        for gang in self._gangs:
            gang.while_waiting = self._actors_file.write
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
        """Wait for answers like `Gang.gather`; replace a member that dies while it is built."""
        while True:
            try:
                return gang.gather(references)
            except MemberLostError as loss:
                for rank, cause in sorted(loss.lost.items()):
                    self._lose(gang, rank, cause)
                    gang.replace(rank)
                references = [gang.control_one(rank, "usage") for rank in range(len(gang.slots))]

    def _begin(self) -> None:
        """Have the servers serve from the newest checkpoint there is."""
        if self._num_beginnings == 0 and self._settings.model_directory:
            # Logs of an earlier session: it may have had other settings, and the metric lines end at the checkpoint.
            shutil.rmtree(Path(self._settings.model_directory).parent / "servers", ignore_errors=True)
        self._bytes_reported_before = self._run_log.bytes_reported
        start = Start(self.run_progress.started_at, self._checkpoint, self._num_beginnings)
        self._num_beginnings += 1
        if self._worker_group.size > 1 and self._worker_group.plan is None:
            self._worker_group.plan = self._plan()
        try:
            self._primaries.begin(start, self._worker_group.plan)
            if not self._announced:
                self._announce()
        except MemberLostError as loss:
            self._recover_servers(loss.lost)
            raise _ServersLostError from loss
        self._resizing.tell_lead()
        if self._leaves is not None:
            try:
                self._leaves.begin(start, self.run_progress.total_steps, self._primaries.expect)
            except (ConnectionError, TimeoutError) as error:  # of channels: a server died meanwhile
                raise _ServersLostError from error

    def _plan(self) -> Any:
        """Return a worker's plan of the network's cut, which holds for the whole run, as servers hold the parts."""
        while True:
            try:
                return self._workers.gather_one(self._workers.call_one(0, "plan"), 0)
            except MemberLostError as loss:
                self._lose(self._workers, 0, loss.lost[0])
                self._put_another(0)

    def _announce(self) -> None:
        sizes = self._servers.gather([self._primaries.ask_lead("describe")])[0]
        self._actors_file.write()
        self._run_log.announce(
            sizes,
            self._settings.batch_size,
            resumed=self._resuming,
            workers=len(self._workers.slots),
            parameter_servers=len(self._servers.slots),
        )
        self._announced = True
        self._actors_file.announce()

    # -- one attempt -------------------------------------------------------------------------------------------------

    def _train(self) -> Any:
        self._stop_sent = False
        self._resizing.see_off({})
        self._worker_group.begin()
        self._primaries.watch()
        while True:
            self._work()
            try:
                return self._finish()
            except _DeadAtTheEndError as loss:  # its replacement learns from the servers that all is done
                self._lose(self._workers, loss.rank, loss.cause)
                self._put_another(loss.rank)
                self._worker_group.employ(loss.rank // self._worker_group.size)
            except _NotDoneError:  # the workers ask the copy what is left
                self._worker_group.begin()

    def _work(self) -> None:
        """Handle events until no worker works any more."""
        worker_group, primaries = self._worker_group, self._primaries
        while worker_group.working:
            asked = self._lines.ask(hasty=bool(self._kills))
            watched = [*worker_group.working, *primaries.ends.values(), *primaries.building, asked]
            ready, _ = ray.wait(watched, num_returns=1, timeout=_LISTEN_S)
            self._writer.raise_if_failed()
            for reference in ready:
                if reference == asked:
                    self._take()
                elif reference in primaries.building:
                    primaries.go_on_building(reference)
                elif reference in worker_group.working:
                    self._hear(worker_group.working.pop(reference), reference)
            if lost := primaries.lost():
                self._on_servers_lost(lost)
                primaries.watch()
                self._take()  # what the lost lead has answered comes before the lines of its copy
            self._mend()
            self._workers.check_places()
            self._actors_file.write()
            if self.run_progress.lost_at_s is None:
                self._workers.refill_spares()
            self._resizing.look(self._settings, worker_group.working)
            if self._stop.is_set() and not self._stop_sent:
                self._stop_sent = True
                primaries.ask_lead("request_stop")
        self._resizing.see_off(worker_group.working)
        self._take()

    def _hear(self, rank: int, reference: Any) -> None:
        """Handle the answer or the loss of a worker."""
        if rank in self._resizing.leaving:
            self._resizing.depart(rank)
            return
        answer = self._settle(rank, reference)
        if answer == SERVER_LOST:  # its connection ends before the process's end is known
            ended, _ = ray.wait(list(self._primaries.ends.values()), num_returns=1, timeout=_LISTEN_S)
            self._worker_group.lost_touch(rank, self.run_progress.last_step, is_explained=bool(ended))
        if stopped_early(answer):
            self._worker_group.stopped(rank, answer)

    def _mend(self) -> None:
        """Set stopped replicas to work again, once none of their workers is busy any more."""
        for replica, known in self._worker_group.to_mend().items():
            first = replica * self._worker_group.size
            if first in self._resizing.leaving:
                continue
            if not known:
                self._count({first: "the stages of a replica lost touch with each other"})
            self._worker_group.employ(replica)

    def _replaced(self, gang: Gang, rank: int, *, spare: bool = False) -> None:
        """Record that another process has replaced a lost one."""
        self._writer.event("worker_replaced", role=gang.shape.role, rank=rank, spare=spare)
        self._actors_file.write()

    def _settle(self, rank: int, reference: Any) -> str | None:
        """Return a worker's answer; None if it was lost, and another one has replaced it."""
        try:
            answer = ray.get(reference)
        except LOSSES as error:
            self.run_progress.lost_at_s = self.run_progress.lost_at_s or self.run_progress.now_s()
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
        """Replace the process of a worker."""
        self._replaced(self._workers, rank, spare=self._workers.replace(rank))

    def _on_servers_lost(self, lost: dict[int, str]) -> None:
        """Have copies take over; if a shard has none, stop all workers and continue from the last checkpoint."""
        self.run_progress.lost_at_s = self.run_progress.lost_at_s or self.run_progress.now_s()
        taken_over = [self._take_over(rank, lost) for rank in sorted(lost) if self._primaries.serves(rank)]
        if all(taken_over):
            if taken_over:  # lines that were not fetched from the lost lead; its copy has recorded the same
                self._run_log.record(self._lines.copies(self.run_progress.last_step), copies=True)
            self._recover_servers(lost)
            self._primaries.build_copies(sorted(lost))
            return
        self._worker_group.abort()
        for gang in (*self._gangs[2:], self._servers):
            gang.control("abort")
        waiting = list(self._worker_group.working)
        _, late = ray.wait(waiting, num_returns=len(waiting), timeout=_SETTLE_TIMEOUT_S) if waiting else ([], [])
        for still in late:
            rank = self._worker_group.working[still]
            self._lose(self._workers, rank, "it did not answer after a server was lost")
            self._workers.replace(rank)
        self._recover_servers(lost)
        raise _ServersLostError

    def _take_over(self, rank: int, lost: dict[int, str]) -> bool:
        """Have a copy serve instead of a lost server; return True if there is a copy."""
        copy = self._primaries.take_over(rank, lost, self._worker_group.reroute)
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
        """Record a loss, and raise if the run may not go on after it."""
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
        """Count a loss, and raise if the run may not go on after it."""
        restarts, most = self.run_progress.restarts, self._max_restarts
        decision = policies.after_loss(causes, restarts=restarts, max_restarts=most, role=role)
        if isinstance(decision, policies.GiveUp):
            raise TrainingError(decision.reason)
        self.run_progress.restarts += 1
        self._progress.set_restarts(self.run_progress.restarts)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _finish(self) -> Any:
        """Return the outcome of the run.

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
                self._worker_group.save_model(outcome.step)
        except MemberLostError as loss:
            raise _DeadAtTheEndError(*min(loss.lost.items())) from loss
        present = [{**one, **self._worker_group.place_of(one["rank"])} for one in of_workers]
        workers = [*present, *self._resizing.departed]
        of_leaves = [one for gang in self._gangs[2:] for one in usage_of_the_living(gang, self._note_loss)]
        bytes_reported = self._run_log.bytes_reported - self._bytes_reported_before
        add_usage(outcome, workers, [*of_servers, *of_leaves], bytes_reported=bytes_reported)
        return outcome

    # -- reports of the lead -----------------------------------------------------------------------------------------

    def _take(self) -> bool:
        """Record the lead's answer (`Lines.take`), and do the kills that are due at its steps; return True if there was
        anything.
        """
        found = self._lines.take()
        self._kill_as_asked()
        return found

    def _kill_as_asked(self) -> None:
        """Do the kills of servers among the run's faults; a worker does its own (`trainers.core.faults`)."""
        for fault in self._kills:
            gang = next((gang for gang in self._gangs if gang.shape.role == fault["role"]), None)
            if gang is not None and self.run_progress.last_step >= fault["at_step"]:
                self._kills.remove(fault)
                self._writer.event("fault", **described(fault))
                slot = gang.slots[fault["rank"]]
                end = slot.end or waiting(slot).end
                ray.kill(slot.actor)
                ray.wait([end], timeout=_SETTLE_TIMEOUT_S)  # it must not answer requests after this
                return
