"""Memory that a server lends for an answer comes back, whatever becomes of the request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from orchestray.platform.comm.channel import thread_pair
from orchestray.platform.errors import OrchestrayError
from orchestray.trainers.ps.protocol.assignments import Compute
from orchestray.trainers.ps.protocol.messages import ServerError
from orchestray.trainers.ps.protocol.requests import Entry, Pull, Request
from orchestray.trainers.ps.server.shard import Shard
from orchestray.trainers.ps.server.state_machine import Machine
from orchestray.trainers.ps.variants.hierarchy.leaf_copies import LocalCopy
from orchestray.trainers.ps.variants.hierarchy.leaf_requests import Asker
from support.central import Plan, Servers, Worker
from support.leaves import Tree

torch.set_num_threads(1)


class FullDisk:
    """A log that fails to write one entry, and says so where the answer waits for it."""

    name = "log"

    def __init__(self, fails_at: int) -> None:
        self._fails_at, self._num_entries = fails_at, 0

    def begin(self, machine: Machine) -> None:
        pass

    def append(self, entry: Entry, tensors: Sequence[Tensor]) -> Callable[[], None]:
        self._num_entries += 1
        fails = self._num_entries == self._fails_at

        def reached() -> None:
            if fails:
                raise OrchestrayError("the disk is full")

        return reached

    def close(self) -> None:
        pass


def is_lent(shard: Shard) -> bool:
    """Return True if an update leaves the present values as they are, and is made in other memory."""
    before = shard.values.data_ptr()
    shard.move(torch.zeros_like(shard.values))
    return shard.values.data_ptr() != before


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_request_that_fails_after_parameters_were_lent_for_its_answer_gives_them_back(fails_at: int) -> None:
    plan = Plan()
    servers = Servers(plan)
    servers.follow(0, FullDisk(fails_at))
    worker = Worker(plan, 0, servers.channels(0))
    failures: list[str] = []
    for _ in range(3):
        try:
            worker.client.hello()
            order = worker.client.next()
            assert isinstance(order, Compute)
            loss_sum, push = worker.compute(order)
            worker.client.push(
                [order], worker.flat.gradient, loss_sums=[loss_sum], pull_into=worker.client.home, **push
            )
        except ServerError as error:
            failures.append(str(error))
    assert failures == ["the disk is full"]
    worker.client.close()
    servers.close()  # with the thread that answers, which gives back what it has sent
    assert not servers.machines[0].shard._lent


def test_a_leaf_lends_nothing_to_a_worker_that_is_gone_before_its_answer() -> None:
    tree = Tree(Plan("asynchronous"), 1)
    leaf = tree.leaves[0]
    assert isinstance(leaf.copy, LocalCopy)
    ours, theirs = thread_pair("worker 0", "leaf")
    for is_gone in (True, False):
        asker = Asker(0, Request(pull=Pull()), [], theirs, is_gone=is_gone)
        leaf.server._requests._finish(asker)
        assert asker.lent != is_gone
        assert is_lent(leaf.copy.shard) != is_gone
    ours.close()
    tree.close()
