"""Backups and logs: what a server has acknowledged is known to a process that outlives it."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from orchestray.platform.comm.channel import Channel, ChannelClosedError, FaultScript, thread_pair
from orchestray.platform.comm.channel.shared_memory import SharedMemoryListener, connect_shared_memory
from orchestray.platform.errors import CheckpointError, StorageError, TrainingError
from orchestray.trainers.ps.durability import persistence
from orchestray.trainers.ps.durability.persistence import DiskLog, holds_snapshot, restore
from orchestray.trainers.ps.durability.replication import Backup, Replicator
from orchestray.trainers.ps.protocol.assignments import Compute
from orchestray.trainers.ps.protocol.requests import Entry, Hello
from orchestray.trainers.ps.server.followers import SupersededError
from orchestray.trainers.ps.server.server import ShardServer
from orchestray.trainers.ps.server.state_machine import Machine
from support.central import JOIN_S, Plan, Servers, Worker, run_all, spawn, train_plain

torch.set_num_threads(1)


def shared_memory_pair(name: str, peer: str) -> tuple[Channel, Channel]:
    with SharedMemoryListener() as listener:
        ours = connect_shared_memory(listener.address, name=name, peer=peer)
        return ours, listener.accept(name=peer, peer=name)


class Dying:
    """A follower that ends the server around its n-th entry: before the one it stands for has it, or after."""

    def __init__(self, inner: Any, entry: int, *, after: bool, kill: Callable[[], None]) -> None:
        self.name = inner.name
        self._inner, self._left, self._after, self._kill = inner, entry, after, kill
        self.begin, self.close = inner.begin, inner.close

    def append(self, entry: Entry, tensors: Sequence[Tensor]) -> Callable[[], None]:
        self._left -= 1
        if self._left == -1 and not self._after:
            self._kill()
        if self._left < -1 or (self._left == -1 and not self._after):
            raise ChannelClosedError("the server is dead")
        wait = self._inner.append(entry, tensors)
        if self._left == -1:
            wait()
            self._kill()
        return wait  # type: ignore[no-any-return]


class Replicated:
    """The servers of a plan, one of which has a backup that takes over when it is killed."""

    def __init__(
        self, plan: Plan, shard: int, pair: Callable[[str, str], tuple[Channel, Channel]] = thread_pair
    ) -> None:
        self.servers = Servers(plan)
        self.shard = shard
        self.backup = Backup(plan.machine(shard))
        self.near, far = pair("primary", "backup")
        self.follower = spawn(lambda: self.backup.follow(far))
        self.deaths = 0
        self._lock = threading.Lock()

    def die_at(self, entry: int, *, after: bool) -> None:
        self.servers.follow(
            self.shard, Dying(Replicator(self.near), entry, after=after, kill=self.servers.servers[self.shard].close)
        )

    def take_over(self) -> None:
        self.deaths += 1
        machine = self.backup.promote()
        self.servers.machines[self.shard] = machine
        self.servers.servers[self.shard] = ShardServer(machine, listener=self.servers.events.append)

    def replace(self, worker: int) -> Callable[[int, Exception], Channel]:
        def again(shard: int, error: Exception) -> Channel:
            assert shard == self.shard
            with self._lock:
                if not self.deaths:
                    self.servers.servers[shard].close()
                    self.take_over()
            return self.servers.channel(shard, worker)

        return again

    def train(self, plan: Plan) -> Tensor:
        workers = [
            Worker(plan, number, self.servers.channels(number), replace=self.replace(number))
            for number in range(plan.num_workers)
        ]
        run_all([worker.run for worker in workers])
        values = self.servers.values()
        self.servers.close()
        self.follower.join(JOIN_S)
        return values


@pytest.mark.parametrize(("shards", "shard"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("after", [False, True])
def test_a_backup_takes_over_at_any_entry_and_no_update_is_lost_or_made_twice(
    shards: int, shard: int, after: bool
) -> None:
    plan = Plan("asynchronous", shards=shards, steps=4)
    wanted = train_plain(plan)[0]
    deaths = 0
    for entry in range(9):
        replicated = Replicated(plan, shard)
        replicated.die_at(entry, after=after)
        assert torch.equal(replicated.train(plan), wanted)
        deaths += replicated.deaths
    assert deaths >= 5


@pytest.mark.parametrize("message", range(10))
@pytest.mark.parametrize("shard", [0, 1])
def test_a_primary_lost_before_any_of_its_answers_is_replaced_in_a_synchronous_run(shard: int, message: int) -> None:
    plan = Plan("synchronous", num_workers=2, shards=2, steps=3, batch_size=10)
    replicated = Replicated(plan, shard)
    replicated.servers.follow(shard, Replicator(replicated.near))
    channels = replicated.servers.channels(0)
    channels[shard].close()
    channels[shard] = replicated.servers.channel(shard, 0, right_faults=FaultScript().fail_at(message))
    workers = [
        Worker(plan, 0, channels, replace=replicated.replace(0)),
        Worker(plan, 1, replicated.servers.channels(1), replace=replicated.replace(1)),
    ]
    run_all([worker.run for worker in workers])
    assert float((replicated.servers.values() - train_plain(plan)[0]).abs().max()) <= 1e-12
    steps = [event["step"] for event in replicated.servers.events if event["event"] == "step"]
    assert sorted(set(steps)) == [1, 2, 3]
    assert replicated.deaths == 1
    replicated.servers.close()


def test_nothing_is_answered_before_the_backup_has_it() -> None:
    plan = Plan("asynchronous")
    servers = Servers(plan)
    # The snapshot is two messages, the greeting and the order one each, the push two.
    near, far = thread_pair("primary", "backup", left_faults=FaultScript().delay(4, 5))
    backup = Backup(plan.machine(0))
    spawn(lambda: backup.follow(far))
    servers.follow(0, Replicator(near))
    pushed = threading.Event()
    servers.machines[0].listener = lambda event: pushed.set()
    worker = Worker(plan, 0, servers.channels(0))
    worker.client.hello()
    order = worker.client.next()
    assert isinstance(order, Compute)
    worker.client.pull()
    loss_sum, push = worker.compute(order)
    handle = worker.client.start_push([order], worker.flat.gradient, loss_sums=[loss_sum], **push)
    assert pushed.wait(JOIN_S)
    assert servers.servers[0].version == 1
    assert (handle.done(), backup.num_entries) == (False, 2)
    near.release()
    near.release()
    assert handle.wait().counts
    assert backup.num_entries == 3
    servers.close()


def test_a_backup_that_is_lost_is_dropped_and_training_goes_on() -> None:
    plan = Plan("asynchronous", steps=5)
    wanted = train_plain(plan)[0]
    for end in ("left_faults", "right_faults"):
        for message in range(8):
            servers = Servers(plan)
            near, far = thread_pair("primary", "backup", **{end: FaultScript().fail_at(message)})
            backup = Backup(plan.machine(0))
            thread = spawn(lambda backup=backup, far=far: backup.follow(far))
            servers.follow(0, Replicator(near))
            worker = Worker(plan, 0, servers.channels(0))
            worker.run()
            assert torch.equal(servers.values(), wanted)
            assert {"event": "follower_lost", "name": "backup"} in servers.events
            servers.close()
            thread.join(JOIN_S)


def test_a_backup_that_joins_late_and_a_backup_of_the_backup_are_the_primary_bit_for_bit() -> None:
    plan = Plan("synchronous", optimizer={"type": "adam"}, steps=6)
    servers = Servers(plan)
    backups = [Backup(plan.machine(0)) for _ in range(2)]
    worker = Worker(plan, 0, servers.channels(0))
    half_way = worker.run(until=lambda order: getattr(order, "step", 0) == 3)
    for backup in backups:
        near, far = thread_pair("primary", "backup")
        spawn(lambda backup=backup, far=far: backup.follow(far))
        servers.follow(0, Replicator(near))
    worker.go_on(half_way)
    servers.close()
    wanted = train_plain(plan)[0]
    for backup in backups:
        machine = backup.promote()
        machine.shard.advance(plan.steps)
        assert torch.equal(machine.shard.values, wanted)
        assert machine.lead.to_json() == servers.machines[0].lead.to_json()


@pytest.mark.parametrize("pair", [thread_pair, shared_memory_pair])
def test_a_primary_that_lives_on_after_its_backup_was_promoted_answers_nobody(
    pair: Callable[[str, str], tuple[Channel, Channel]],
) -> None:
    plan = Plan("asynchronous", steps=4)
    replicated = Replicated(plan, 0, pair)
    replicated.servers.follow(0, Replicator(replicated.near))
    worker = Worker(plan, 0, replicated.servers.channels(0), replace=replicated.replace(0))
    half_way = worker.run(until=lambda order: getattr(order, "step", 0) == 2)
    replicated.take_over()
    worker.go_on(half_way)
    assert torch.equal(replicated.servers.values(), train_plain(plan)[0])
    replicated.servers.close()


@pytest.mark.parametrize("pair", [thread_pair, shared_memory_pair])
def test_no_entry_is_reported_as_safe_once_the_backup_was_promoted(
    pair: Callable[[str, str], tuple[Channel, Channel]],
) -> None:
    near, far = pair("primary", "backup")
    replicator = Replicator(near)
    waits = [replicator.append(HELLO, ()) for _ in range(3)]
    far.send([], tag="done")
    far.send([], tag="promoted")
    far.close()
    for wait in reversed(waits):
        with pytest.raises(SupersededError, match="backup serves instead"):
            wait()
    with pytest.raises(SupersededError):
        replicator.append(HELLO, ())()


def test_a_backup_without_a_state_does_not_take_over() -> None:
    with pytest.raises(TrainingError, match=r"cannot take over: its primary was lost before it told its state"):
        Backup(Plan().machine(0)).promote()


def test_workers_that_do_not_come_back_after_a_takeover_are_forgotten_and_their_share_is_done() -> None:
    plan = Plan("synchronous", num_workers=2, steps=3)
    replicated = Replicated(plan, 0)
    replicated.servers.follow(0, Replicator(replicated.near))
    gone = Worker(plan, 0, replicated.servers.channels(0))
    gone.client.hello()
    gone.client.next()
    other = Worker(plan, 1, replicated.servers.channels(1), replace=replicated.replace(1))
    other.client.hello()
    order = other.client.next()
    channel = replicated.replace(1)(0, ChannelClosedError("killed"))
    other.client.reconnect(0, channel)
    replicated.servers.servers[0].forget(0)
    other.go_on(order)
    assert float((replicated.servers.values() - train_plain(plan)[0]).abs().max()) <= 1e-12
    replicated.servers.close()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("log_bytes", [1, 1 << 30])
def test_all_servers_killed_at_any_entry_come_back_from_disk_with_every_acknowledged_update(
    tmp_path: Path, after: bool, log_bytes: int
) -> None:
    plan = Plan("asynchronous", shards=2, optimizer={"type": "adam"}, steps=4)
    wanted = train_plain(plan)[0]
    deaths = 0
    for entry in range(9):
        servers = Servers(plan)
        killed = threading.Event()

        def kill(servers: Servers = servers, killed: threading.Event = killed) -> None:
            killed.set()
            for server in servers.servers:
                server.close()

        for shard in range(2):
            log = DiskLog(tmp_path / f"{entry}-{shard}", log_bytes=log_bytes)
            dying = Dying(log, entry if shard == 0 else 1000, after=after, kill=kill)
            servers.follow(shard, dying)
        again: dict[int, Servers] = {}

        def replace(
            shard: int,
            _error: Exception,
            entry: int = entry,
            again: dict[int, Servers] = again,
            servers: Servers = servers,
        ) -> Channel:
            if not again:
                for thread in servers.threads:
                    thread.join(JOIN_S)  # a process that is killed writes nothing more to its log
                machines = [plan.machine(shard) for shard in range(2)]
                for number, machine in enumerate(machines):
                    restore(tmp_path / f"{entry}-{number}", machine)
                again[0] = Servers(plan, machines)
                for number in range(2):
                    again[0].follow(number, DiskLog(tmp_path / f"{entry}-{number}"))
            return again[0].channel(shard, 0)

        worker = Worker(plan, 0, servers.channels(0), replace=replace)
        worker.run()
        assert torch.equal(again.get(0, servers).values(), wanted)
        assert bool(again) == killed.is_set()
        deaths += len(again)
        for each in (servers, *again.values()):
            each.close()
    assert deaths >= 5


def logged(plan: Plan, directory: Path) -> Tensor:
    servers = Servers(plan)
    servers.follow(0, DiskLog(directory))
    Worker(plan, 0, servers.channels(0)).run()
    values = servers.values()
    servers.close()
    return values


HELLO = Entry(worker=0, hello=Hello(0, is_new=True))


def restored(plan: Plan, directory: Path) -> Machine:
    machine = plan.machine(0)
    restore(directory, machine)
    return machine


def test_a_worker_that_leaves_as_its_server_closes_is_written_to_no_closed_log(tmp_path: Path) -> None:
    machine = Plan("asynchronous").machine(0)
    server = ShardServer(machine, [DiskLog(tmp_path)])
    server.change(HELLO)
    server.close()
    server.forget(0)
    assert machine.coordinator is not None
    assert 0 not in machine.coordinator.workers


def test_a_log_is_read_once_its_server_writes_no_more(tmp_path: Path) -> None:
    log = DiskLog(tmp_path, log_bytes=1)
    log.begin(Plan("asynchronous").machine(0))
    log.append(HELLO, ())
    made: list[int] = []
    reader = spawn(lambda: made.append(restore(tmp_path, Plan("asynchronous").machine(0))))
    log.append(HELLO, ())  # and a new snapshot, with a log of its own
    assert not made
    log.append(HELLO, ())
    log.close()
    reader.join(JOIN_S)
    assert made == [1]


def test_a_log_that_its_server_replaces_between_its_listing_and_its_opening_is_read_from_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = DiskLog(tmp_path, log_bytes=1)
    log.begin(Plan("asynchronous").machine(0))
    log.append(HELLO, ())
    list_snapshots = persistence._snapshots

    def list_before_the_server_writes(directory: Path) -> list[int]:
        monkeypatch.undo()
        found = list_snapshots(directory)
        log.append(HELLO, ())
        log.close()
        return found

    monkeypatch.setattr(persistence, "_snapshots", list_before_the_server_writes)
    assert restore(tmp_path, Plan("asynchronous").machine(0)) == 1
    assert holds_snapshot(tmp_path)


def test_a_log_that_ends_within_a_record_ends_before_it(tmp_path: Path) -> None:
    plan = Plan("asynchronous", steps=3)
    values = logged(plan, tmp_path)
    assert torch.equal(restored(plan, tmp_path).shard.values, values)
    (log,) = tmp_path.glob("log-*")
    whole = log.read_bytes()
    versions = []
    for length in range(0, len(whole), 211):
        log.write_bytes(whole[:length])
        versions.append(restored(plan, tmp_path).shard.version)
    assert versions == sorted(versions)
    assert set(versions) == {0, 1, 2, 3}


def test_a_log_that_is_damaged_within_a_record_ends_before_it(tmp_path: Path) -> None:
    plan = Plan("asynchronous", steps=3)
    logged(plan, tmp_path)
    (log,) = tmp_path.glob("log-*")
    whole = log.read_bytes()
    versions = []
    for place in [7, *range(8, len(whole), len(whole) // 12)]:  # byte 7 is the highest of a length
        log.write_bytes(whole[:place])
        before = restored(plan, tmp_path).shard.version
        log.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        versions.append(restored(plan, tmp_path).shard.version)
        assert versions[-1] == before
    assert set(versions) == {0, 1, 2, 3}  # the last record is not an update


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Limit the size of files: a write is taken in part, and the rest refused, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("left_out", [1, 8 * 100 + 1], ids=["values", "header"])
def test_an_update_that_the_disk_takes_only_a_part_of_is_refused_and_the_log_stays_whole(
    tmp_path: Path, left_out: int
) -> None:
    machine = Plan("asynchronous").machine(0)
    log = DiskLog(tmp_path)
    log.begin(machine)
    values = [torch.arange(100, dtype=torch.float64)]
    log.append(HELLO, values)
    (path,) = tmp_path.glob("log-*")
    record_bytes = path.stat().st_size
    with files_of_at_most(2 * record_bytes - left_out), pytest.raises(StorageError, match="could not be written"):
        log.append(HELLO, values)
    log.append(HELLO, values)
    log.close()
    assert path.stat().st_size == 2 * record_bytes
    assert restore(tmp_path, Plan("asynchronous").machine(0)) == 2


def test_a_snapshot_without_its_log_is_no_server(tmp_path: Path) -> None:
    logged(Plan("asynchronous", steps=3), tmp_path)
    (log,) = tmp_path.glob("log-*")
    log.unlink()
    with pytest.raises(CheckpointError, match="holds snapshot 0, but not log-0"):
        restore(tmp_path, Plan("asynchronous").machine(0))


def test_an_empty_directory_is_no_server(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no snapshot of a parameter server"):
        restore(tmp_path, Plan().machine(0))


def test_a_server_whose_place_nobody_takes_ends_its_worker_with_the_reason() -> None:
    plan, asked = Plan("asynchronous"), list[int]()
    servers = Servers(plan)

    def nobody(shard: int, error: Exception) -> Channel:
        asked.append(shard)
        raise ChannelClosedError(f"nobody took the place of parameter server {shard}: {error}")

    worker = Worker(plan, 0, servers.channels(0), replace=nobody)
    worker.client.hello()
    servers.close()
    with pytest.raises(ChannelClosedError, match="nobody took the place of parameter server 0"):
        worker.client.next()
    assert asked == [0]


def test_a_log_of_a_server_that_was_lost_before_it_wrote_holds_nothing_to_go_on_from(tmp_path: Path) -> None:
    assert not holds_snapshot(tmp_path / "servers" / "0")
    (tmp_path / "servers" / "0").mkdir(parents=True)
    assert not holds_snapshot(tmp_path / "servers" / "0")
    logged(Plan("asynchronous", steps=3), tmp_path)
    assert holds_snapshot(tmp_path)
