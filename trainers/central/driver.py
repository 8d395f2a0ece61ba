"""The driver of a run under parameter servers: a gang of servers, a gang of workers, and who is connected to whom.

It imports no torch. Unlike under a lock-step scheme, a worker that is lost is replaced while the others go on.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayError

from orchestray.platform import policies
from orchestray.platform.causes import cause_of
from orchestray.platform.errors import OrchestrayError, TrainingError
from orchestray.platform.gang import Gang, MemberLostError
from orchestray.platform.gang_pool import acquire_all, release
from orchestray.platform.member import Failure, Identity
from orchestray.platform.placement import Shape
from orchestray.trainers.central.address import SERVER_LOST, Address
from orchestray.trainers.central.leaf_driver import LEAF_HOST, Leaves
from orchestray.trainers.central.resizing import Resizing
from orchestray.trainers.kills import Kills, described
from orchestray.trainers.scaling import Scaling
from orchestray.trainers.settings import Start

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping, Sequence

    from orchestray.platform.cluster import Cluster
    from orchestray.trainers.settings import ReplicaSettings
    from orchestray.trainers.story import Book

_SERVER_HOST = "orchestray.trainers.central.server_host:ServerHost"
_WORKER_HOST = "orchestray.trainers.central.worker_host:WorkerHost"
_LISTEN_S = 0.5
_DRAIN_INTERVAL_S = 0.1
_DRAIN_TIMEOUT_S = 0.3
_SETTLE_TIMEOUT_S = 120.0
_TOLD = ("shares", "busy_s", "waited_s", "left_at_step")
"""What the result says of each worker."""


class _ServersLostError(Exception):
    """A server without a copy is gone: all go on from the last checkpoint."""


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
        self._announced = False
        self._actors: list[dict[str, Any]] = []
        self._num_meetings = self._num_beginnings = 0
        self._kills = [
            fault for fault in settings.faults if fault["kind"] == "kill" and fault["role"] != shapes[1].role
        ]
        """Faults that are still to happen."""
        self._nodes: list[str] = []
        """Of the servers."""
        self._building: dict[Any, int] = {}
        """References of servers that are being made copies, with their ranks."""
        self._primaries: list[int] = []
        """The server of each shard that serves it; the others of the shard are its copies."""
        self._ports: list[int] = []
        self._kills_of_workers = Kills(settings.faults, shapes[1].role, is_alone=True)

    def run(self) -> Any:
        """Train to the end; returns the `Outcome`.

        Raises:
            OrchestrayError: the run failed; what the user can do is in its text.
        """
        self._gangs = acquire_all(self._cluster, self._shapes, self._progress.event)
        self._servers, self._workers = self._gangs[:2]
        self._leaves = Leaves(self._gangs[2], self._lose, self._leaf_replaced) if len(self._gangs) > 2 else None
        self._book.fetch_copies = self._fetch_copies
        scaling = Scaling(self._book, self._workers, _WORKER_HOST, self._stop)
        self._resizing = Resizing(
            self._workers, scaling, self.story, employ=self._employ, cut=lambda _: self._cut_for_workers()
        )
        finished = False
        try:
            for gang in self._gangs:
                gang.while_waiting = self._write_actors
            outcome = self._train_until_done()
            finished = True
        finally:
            scaling.close()
            for gang in self._gangs:
                if finished:
                    release(gang)
                else:
                    gang.close()
            self._actors = []
            self._writer.actors([])
        return outcome

    def _train_until_done(self) -> Any:
        hosts = (_SERVER_HOST, _WORKER_HOST, LEAF_HOST)
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
        start = Start(self.story.started_at, self._checkpoint, self._num_beginnings)
        self._num_beginnings += 1
        try:
            self._nodes = self._servers.nodes()
            self._ports = self._servers.gather(
                [self._servers.call_one(rank, "begin", rank, start, node) for rank, node in enumerate(self._nodes)]
            )
        except MemberLostError as loss:
            self._recover_servers(loss.lost)
            raise _ServersLostError from loss
        self._primaries = list(range(self._num_shards))
        for rank in range(self._num_shards, len(self._servers.seats)):
            self._attach_copy(rank)
        self._cut_for_workers()
        if not self._announced:
            self._announce()
        if self._leaves is not None:
            try:
                self._leaves.begin(start, self.story.total_steps, self._expect)
            except (ConnectionError, TimeoutError) as error:  # of channels: a server died meanwhile
                raise _ServersLostError from error

    @property
    def _num_shards(self) -> int:
        return int(self._settings.exchange["shards"])

    @property
    def _lead(self) -> int:
        """The server that holds the ledger."""
        return self._primaries[0]

    def _attach_copy(self, rank: int) -> None:
        """Have a server that has just been built follow the one it is a copy of; a death meanwhile is seen later."""
        self._num_meetings += 1
        name = f"copy-{rank}-{self._num_meetings}"
        primary = self._primaries[rank % self._num_shards]
        self._servers.control_one(rank, "follow", name)
        self._servers.control_one(primary, "replicate", Address(self._nodes[rank], self._ports[rank], name))

    def _announce(self) -> None:
        sizes = self._servers.gather([self._servers.control_one(self._lead, "describe")])[0]
        self.story.total_steps = sizes["total_steps"]
        self._progress.set_total(sizes["total_steps"])
        if sizes["samples"] < self._settings.batch_size:
            self._progress.event(
                f"warning: the data has {sizes['samples']} samples, fewer than one batch of "
                f"{self._settings.batch_size}: each step uses all of them."
            )
        self._write_actors()
        self._writer.event(
            "resumed" if self._resuming else "started",
            **sizes,
            workers=len(self._workers.seats),
            parameter_servers=len(self._servers.seats),
        )
        self._announced = True
        self._tell_started(self._actors)

    # -- one attempt -------------------------------------------------------------------------------------------------

    def _train(self) -> Any:
        self._stop_sent = False
        self._building.clear()
        self._resizing.see_off({})
        rank_of = {self._employ(rank): rank for rank in range(len(self._workers.seats))}
        ends = dict(enumerate(self._servers.watch()))
        drain = self._ask_lines()
        while rank_of:
            watched = [*rank_of, *ends.values(), *self._building, drain]
            ready, _ = ray.wait(watched, num_returns=1, timeout=_LISTEN_S)
            self._writer.raise_if_failed()
            for reference in ready:
                if reference == drain:
                    self._take(drain)
                    drain = self._ask_lines()
                elif reference in self._building:
                    self._go_on_building(reference)
                elif reference in rank_of:
                    rank = rank_of.pop(reference)
                    if rank in self._resizing.leaving:
                        self._resizing.depart(rank)
                        continue
                    answer = self._settle(rank, reference)
                    if answer == SERVER_LOST:  # its connection ends before the process's end is known
                        ray.wait(list(ends.values()), num_returns=1, timeout=_LISTEN_S)
                    if answer in (None, SERVER_LOST) and not _ended(ends):
                        rank_of[self._employ(rank)] = rank
            if lost := _ended(ends):
                self._on_servers_lost(lost, rank_of)
                ends = dict(enumerate(self._servers.watch()))
                self._take(drain)  # what was asked for is not to be lost with the question
                drain = self._ask_lines()
            self._write_actors()
            if self.story.lost_at_s is None:
                self._workers.refill_spares()
            self._resizing.look(self._settings, rank_of)
            if self._stop.is_set() and not self._stop_sent:
                self._stop_sent = True
                self._servers.control_one(self._lead, "request_stop")
        self._resizing.see_off(rank_of)
        return self._finish(drain)

    def _cut_for_workers(self) -> None:
        """Tell the lead how many workers there are from now on; also one that was started, or took over, since."""
        if self._resizing.num_workers is not None:
            self._servers.control_one(self._lead, "resize", self._resizing.num_workers)

    def _employ(self, rank: int) -> Any:
        """Connect a worker with every server, and set it to work; returns the reference of its answer."""
        self._num_meetings += 1
        name = f"worker-{rank}-{self._num_meetings}"
        addresses = self._expect(rank, name) if self._leaves is None else [self._leaves.expect(rank, name)]
        return self._workers.call_one(rank, "train", rank, self._kills_of_workers.num_over(rank), addresses)

    def _expect(self, number: int, name: str) -> list[Address]:
        """Have all servers expect a worker, or a leaf server, under this name; returns where they are."""
        return [self._expect_at(server, number, name) for server in self._primaries]

    def _expect_at(self, server: int, number: int, name: str) -> Address:
        self._servers.control_one(server, "accept", number, name)
        return Address(self._nodes[server], self._ports[server], name)

    def _leaf_replaced(self, gang: Gang, rank: int) -> None:
        self._writer.event("worker_replaced", role=gang.shape.role, rank=rank, spare=False)
        self._write_actors()

    def _settle(self, rank: int, reference: Any) -> str | None:
        """A worker's answer; None if it was lost, and another one is in its place."""
        try:
            answer = ray.get(reference)
        except RayActorError as error:
            self.story.lost_at_s = self.story.lost_at_s or self.story.now_s()
            self._lose(self._workers, rank, cause_of(error))
            from_spare = self._workers.replace(rank)
            self._writer.event("worker_replaced", role=self._workers.shape.role, rank=rank, spare=from_spare)
            self._write_actors()
            return None
        except RayError as error:
            raise TrainingError(f"Worker {rank} failed: {str(error).strip().splitlines()[-1]}") from error
        if isinstance(answer, Failure):
            self._writer.event("worker_failed", role="worker", rank=rank, traceback=answer.traceback)
            raise answer.error
        return str(answer)

    def _on_servers_lost(self, lost: dict[int, str], rank_of: dict[Any, int]) -> None:
        """Have copies take over; where a shard has none, stop everybody, and go on from the last checkpoint."""
        self.story.lost_at_s = self.story.lost_at_s or self.story.now_s()
        taken_over = [self._take_over(rank, lost) for rank in sorted(lost) if rank in self._primaries]
        if all(taken_over):
            if taken_over:  # lines that nobody had fetched from the lost lead; its copy has noted the same
                self._book.record(self._fetch_copies(self.story.last_step), copies=True)
            self._recover_servers(lost)
            self._build_copies(sorted(lost))
            return
        for gang in (self._workers, *self._gangs[2:], self._servers):
            gang.control("abort")
        waiting = list(rank_of)
        _, late = ray.wait(waiting, num_returns=len(waiting), timeout=_SETTLE_TIMEOUT_S) if waiting else ([], [])
        for still in late:
            self._lose(self._workers, rank_of[still], "it did not answer after a server was lost")
            self._workers.replace(rank_of[still])
        self._recover_servers(lost)
        raise _ServersLostError

    def _take_over(self, rank: int, lost: dict[int, str]) -> bool:
        """Have a copy of a lost server serve in its place; returns whether there is one."""
        shard = rank % self._num_shards
        copies = [other for other in range(shard, len(self._servers.seats), self._num_shards) if other not in lost]
        for copy in copies:
            try:
                port = self._servers.gather_one(self._servers.call_one(copy, "promote"), copy)
            except OrchestrayError:
                continue  # it died too, or never had the state
            self._primaries[shard], self._ports[copy] = copy, port
            if self._leaves is not None:
                self._leaves.reroute(shard, partial(self._expect_at, copy))
            for worker in range(len(self._workers.seats) if self._leaves is None else 0):
                self._num_meetings += 1
                name = f"worker-{worker}-{self._num_meetings}"
                self._workers.control_one(worker, "reroute", shard, self._expect_at(copy, worker, name))
            self._cut_for_workers()
            self._writer.event("server_taken_over", role=self._servers.shape.role, rank=copy, shard=shard)
            for other in copies:
                if other != copy:
                    self._build_copies([other])
            return True
        return False

    def _build_copies(self, ranks: list[int]) -> None:
        """Make servers copies of the ones that serve now; `_go_on_building` does the rest, while the run goes on."""
        for rank in ranks:
            self._building[self._servers.seats[rank].identifying] = rank

    def _go_on_building(self, reference: Any) -> None:
        rank = self._building.pop(reference)
        try:
            answer = self._servers.gather_one(reference, rank)
        except MemberLostError:
            return  # seen in its own place
        if isinstance(answer, Identity):
            self._nodes[rank] = answer.node
            start = Start(self.story.started_at, self._checkpoint)
            self._building[self._servers.call_one(rank, "begin", rank, start, answer.node, True)] = rank
        else:
            self._ports[rank] = answer
            self._attach_copy(rank)

    def _recover_servers(self, lost: dict[int, str]) -> None:
        for rank, cause in sorted(lost.items()):
            self._lose(self._servers, rank, cause)
            self._servers.replace(rank)
            self._writer.event("worker_replaced", role=self._servers.shape.role, rank=rank, spare=False)
        self._write_actors()

    def _lose(self, gang: Gang, rank: int, cause: str) -> None:
        """Write down a loss, and see whether the run may go on after it."""
        role = gang.shape.role
        self._writer.event("worker_lost", role=role, rank=rank, cause=cause)
        self._progress.event(f"{role.replace('_', ' ')} {rank} lost: {cause}")
        if gang is self._workers:
            for kill in self._kills_of_workers.lost([rank]):
                self._writer.event("fault", **described(kill))
        decision = policies.after_loss({rank: cause}, restarts=self.story.restarts, max_restarts=self._max_restarts)
        if isinstance(decision, policies.GiveUp):
            raise TrainingError(decision.reason)
        self.story.restarts += 1
        self._progress.set_restarts(self.story.restarts)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _finish(self, drain: Any) -> Any:
        self._take(drain)
        while self._take(self._ask_lines(timeout_s=0.0)):
            pass
        outcome = self._servers.gather([self._servers.call_one(self._lead, "outcome")])[0]
        used = [self._usage(gang) for gang in self._gangs]
        servers, workers = [one for gang in (used[0], *used[2:]) for one in gang], [*used[1], *self._resizing.departed]
        outcome.bytes_sent += sum(one["bytes"] for one in servers)
        outcome.bytes_dense = outcome.bytes_sent + sum(one.get("saved_bytes", 0) for one in [*workers, *servers])
        outcome.memory = [one["memory"] for one in [*workers, *servers]]
        outcome.told |= {
            "workers": [{key: one[key] for key in _TOLD if key in one} for one in workers],
        }
        if outcome.ended != "interrupted":
            self._workers.gather([self._workers.call_one(0, "save_model", outcome.step)])
        return outcome

    def _usage(self, gang: Gang) -> list[dict[str, Any]]:
        return gang.gather([gang.control_one(rank, "usage") for rank in range(len(gang.seats))])

    # -- what the lead says ------------------------------------------------------------------------------------------

    def _fetch_copies(self, step: int) -> list[dict[str, Any]]:
        try:
            lines = ray.get(self._servers.control_one(self._lead, "lines_since", step - 1))
        except RayError:
            return []
        return list(lines) if isinstance(lines, list) else []

    def _ask_lines(self, timeout_s: float = _DRAIN_TIMEOUT_S) -> Any:
        return self._servers.control_one(self._lead, "drain", timeout_s, _DRAIN_INTERVAL_S, self.story.written_step)

    def _take(self, reference: Any) -> bool:
        try:
            lines = ray.get(reference)
        except RayError:
            return False  # the death shows in its own place
        if not isinstance(lines, list):
            return False
        self._book.record(lines)
        self._kill_as_asked()
        return bool(lines)

    def _kill_as_asked(self) -> None:
        """Do the kills of servers among the run's faults; a worker does its own (`trainers.faults`)."""
        for fault in self._kills:
            gang = next((gang for gang in self._gangs if gang.shape.role == fault["role"]), None)
            if gang is not None and self.story.last_step >= fault["at_step"]:
                self._kills.remove(fault)
                self._writer.event("fault", **described(fault))
                ray.kill(gang.seats[fault["rank"]].actor)
                return

    def _write_actors(self) -> None:
        """Keep `actors.json` current, and say of each new process that it is there."""
        actors: list[dict[str, Any]] = [
            {"role": role, "rank": rank, "pid": identity.pid, "node": identity.node}
            for gang in (self._workers, self._servers, *self._gangs[2:])
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


def _ended(ends: Mapping[int, Any]) -> dict[int, str]:
    """Why processes have ended, by rank, of those that have."""
    causes = {}
    for rank, reference in ends.items():
        if ray.wait([reference], timeout=0)[0]:
            try:
                ray.get(reference)
            except RayError as error:
                causes[rank] = cause_of(error)
    return causes
