"""More workers and fewer: who the lead takes to be there, also a lead that took over meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from orchestray.platform.comm.channel import thread_pair
from orchestray.trainers.driver.servers.resizing import Resizing
from orchestray.trainers.ps.durability.replication import Backup, Replicator
from orchestray.trainers.ps.protocol.assignments import Compute
from orchestray.trainers.ps.server.server import ShardServer
from support.central import Plan, Servers, Worker, run_all, spawn, train_plain

torch.set_num_threads(1)


class GangOfTwo:
    """Two workers whose processes do what is asked of them."""

    def __init__(self) -> None:
        self.slots = ["worker 0", "worker 1"]

    def control_one(self, _rank: int, method: str) -> Any:
        return {} if method == "usage" else None

    def gather_one(self, reference: Any, _rank: int) -> Any:
        return reference


class Changes:
    """Changes to these numbers of workers, one after the other."""

    def __init__(self, gang: GangOfTwo, *sizes: int) -> None:
        self.gang, self.sizes = gang, list(sizes)

    def resize(self) -> None:
        self.gang.slots = [f"worker {rank}" for rank in range(self.sizes.pop(0))]

    def done(self, _step: int) -> None:
        pass


def resizing(*sizes: int, cut: Callable[[int], None], expel: Callable[[int], None]) -> Resizing:
    gang, run_progress = GangOfTwo(), SimpleNamespace(last_step=1)
    return Resizing(gang, Changes(gang, *sizes), run_progress, cut=cut, expel=expel)  # type: ignore[arg-type]


def leave(resizing: Resizing, rank: int) -> None:
    resizing.dismiss(rank)
    resizing.depart(rank)
    resizing.resize(rank)


def test_a_replica_that_left_when_the_lead_was_dead_holds_nothing_of_the_copy_that_takes_over() -> None:
    plan = Plan("synchronous", num_workers=2, steps=3)
    servers, backup = Servers(plan), Backup(plan.machine(0))
    near, far = thread_pair("primary", "backup")
    follower = spawn(lambda: backup.follow(far))
    servers.follow(0, Replicator(near))
    staying, leaving = (Worker(plan, number, servers.channels(number)) for number in range(2))
    for worker in (staying, leaving):
        worker.client.hello()
    order = staying.client.next()
    assert isinstance(leaving.client.next(), Compute)  # a share that nobody else is given while it is there
    living: list[ShardServer] = []  # the lead; nobody while it is dead and that is not known

    def cut(num_shares: int) -> None:
        for lead in living:
            lead.resize(num_shares)

    def expel(worker: int) -> None:
        for lead in living:
            lead.forget(worker)

    changes = resizing(1, cut=cut, expel=expel)
    servers.servers[0].close()
    leave(changes, 1)
    servers.machines[0] = backup.promote()
    servers.servers[0] = ShardServer(servers.machines[0], listener=servers.events.append)
    living.append(servers.servers[0])
    changes.tell_lead()
    assert servers.machines[0].lead.workers == [0]

    staying.client.reconnect(0, servers.channel(0, 0))
    run_all([lambda: staying.go_on(order)])
    assert float((servers.values() - train_plain(plan)[0]).abs().max()) <= 1e-12
    servers.close()
    follower.join()


def test_a_lead_that_takes_over_is_not_told_that_a_replica_is_gone_whose_place_another_has_taken() -> None:
    told: list[tuple[str, int]] = []
    changes = resizing(
        1, 2, cut=lambda number: told.append(("cut", number)), expel=lambda number: told.append(("expel", number))
    )
    changes.tell_lead()
    assert told == []  # nobody asked for another number: the lead knows it from the settings
    leave(changes, 1)
    told.clear()
    changes.tell_lead()
    assert told == [("cut", 1), ("expel", 1)]
    changes.resize(2)
    told.clear()
    changes.tell_lead()
    assert told == [("cut", 2)]
