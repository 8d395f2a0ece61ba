"""Collective operations, and what becomes of them when a member dies or leaves."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore

from orchestray.platform.comm.backend import BackendKind
from orchestray.platform.comm.collective import Collective, PeerLostError, ring_bytes
from orchestray.platform.comm.process_groups import Backend
from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.comm.thread_group import in_threads
from orchestray.platform.process.wait_clock import Waiting
from support.forked import Forked
from support.patience import PATIENCE_S
from support.threads import TIMEOUT_S, make_gloo_threads, run_replicas


@pytest.mark.parametrize("size", [1, 2, 3])
def test_operations_combine_all_ranks(size: int) -> None:
    def member(collective: Collective) -> None:
        assert collective.size == size
        total = torch.tensor([1.0, collective.rank])
        collective.all_reduce(total)
        assert total.tolist() == [size, sum(range(size))]
        largest = torch.tensor([collective.rank, -collective.rank])
        collective.all_reduce(largest, "max")
        assert largest.tolist() == [size - 1, 0]
        rows = collective.all_gather(torch.full((2, 3), collective.rank))
        assert rows.shape == (size, 2, 3)
        assert rows[:, 0, 0].tolist() == list(range(size))
        collective.barrier()

    run_replicas(size, member)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64])
def test_broadcast_takes_any_dtype_and_shape(dtype: torch.dtype) -> None:
    def member(collective: Collective) -> None:
        for shape in ((2, 3), (), (0, 4)):
            sent = torch.ones(shape).to(dtype)
            tensor = sent.clone() if collective.rank == 1 else torch.zeros(shape).to(dtype)
            collective.broadcast(tensor, 1)
            assert torch.equal(tensor, sent)

    run_replicas(3, member)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers_are_added_and_gathered(dtype: torch.dtype) -> None:
    def member(collective: Collective) -> None:
        rank, size = collective.rank, collective.size
        own = torch.tensor([complex(1, rank), complex(rank, -1)], dtype=dtype)
        total = own.clone()
        collective.all_reduce(total)
        assert total.tolist() == [complex(size, 3), complex(3, -size)]
        assert torch.equal(collective.all_gather(own)[rank], own)
        whole = torch.zeros(2 * size, dtype=dtype)
        collective.start_all_gather(whole, own).wait()
        assert torch.equal(whole[2 * rank : 2 * rank + 2], own)
        part = torch.zeros(2, dtype=dtype)
        collective.start_reduce_scatter(part, torch.cat([own] * size)).wait()
        assert torch.equal(part, total)

    run_replicas(3, member)


def test_bytes_sent_are_counted_siblings_included() -> None:
    def member(collective: Collective) -> int:
        collective.all_reduce(torch.zeros(30))
        collective.all_gather(torch.zeros(5))
        collective.broadcast(torch.zeros(7), 0)
        collective.barrier()
        collective.sibling("other").all_reduce(torch.zeros(9))
        return collective.bytes_sent

    every = 2 * 2 * 120 // 3 + 2 * 20 + 2 * 2 * 36 // 3
    assert run_replicas(3, member) == [every + 2 * 28, every, every]
    assert ring_bytes(torch.zeros(1), 3) == 6  # 16 / 3, rounded up


def test_siblings_are_ordered_apart() -> None:
    def member(collective: Collective) -> list[float]:
        other = collective.sibling("other")
        assert collective.sibling("other") is other
        a, b = torch.tensor([1.0]), torch.tensor([10.0])
        first, second = (collective, other) if collective.rank else (other, collective)
        works = {first: first.start_all_reduce(a if first is collective else b)}
        works[second] = second.start_all_reduce(a if second is collective else b)
        for work in works.values():
            work.wait()
            work.wait()  # waiting again is nothing
        return [a.item(), b.item()]

    assert run_replicas(2, member) == [[2.0, 20.0]] * 2


def test_what_is_not_contiguous_is_refused() -> None:
    turned = torch.zeros(2, 3).t()

    def member(collective: Collective) -> None:
        with pytest.raises(ValueError, match="contiguous"):
            collective.all_reduce(turned)
        with pytest.raises(ValueError, match="contiguous"):
            collective.broadcast(turned, 0)

    run_replicas(2, member)


def test_an_exchange_between_devices_is_refused_before_anything_is_sent() -> None:
    def member(collective: Collective) -> int:
        with pytest.raises(ValueError, match="tensors of one device, got some of cpu, meta"):
            collective.start_exchange({1: torch.zeros(2, device="meta")}, {1: torch.zeros(2)})
        return collective.own_bytes_sent

    assert run_replicas(2, member) == [0, 0]


def test_one_alone_needs_nobody_and_sends_nothing() -> None:
    solo = SoloCollective()
    tensor = torch.tensor([3.0])
    solo.all_reduce(tensor)
    solo.broadcast(tensor, 0)
    solo.barrier()
    assert solo.all_gather(tensor).tolist() == [[3.0]]
    assert tensor.item() == 3.0
    assert (solo.rank, solo.size, solo.bytes_sent) == (0, 1, 0)
    assert solo.sibling("any") is solo
    solo.abort()


@pytest.mark.parametrize("leaver_has_pending", [False, True])
def test_a_member_that_leaves_makes_the_others_pending_operations_raise(leaver_has_pending: bool) -> None:
    """Use four in a ring: rank 3, which is not a neighbour of rank 1, must hear of it long before the timeout."""

    def member(collective: Collective) -> str:
        other = collective.sibling("other")
        collective.barrier()
        if collective.rank == 1:
            if leaver_has_pending:
                collective.start_all_reduce(torch.ones(1000))
            collective.abort()
            with pytest.raises(PeerLostError, match="left its group"):
                other.barrier()
            return "left"
        collective.start_all_reduce(torch.ones(1000))
        last = collective.start_all_reduce(torch.ones(1000))  # the leaver takes part in the first at most
        with pytest.raises(PeerLostError, match=f"Rank {collective.rank} of 4 lost a peer"):
            last.wait()
        with pytest.raises(PeerLostError):
            other.all_reduce(torch.ones(1))
        return "lost"

    assert run_replicas(4, member, timeout_s=600.0) == ["lost", "left", "lost", "lost"]


def test_abort_returns_at_once_while_its_own_operation_waits_for_another_member() -> None:
    members = make_gloo_threads(2, timeout_s=600.0)
    pending = members[0].start_all_reduce(torch.ones(10))
    members[0].abort()  # rank 1 has not come, and may never
    with pytest.raises(PeerLostError, match="left its group"):
        pending.wait()
    members[0].abort()
    members[1].close()
    members[0].close()
    names = [thread.name for thread in threading.enumerate()]
    assert "orchestray-leave-group" not in names


class Noticed(Waiting):
    """A `Waiting` that shows when a wait has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun = threading.Event()

    @contextlib.contextmanager
    def during(self) -> Iterator[None]:
        self.has_begun.set()
        with super().during():
            yield


def test_abort_wakes_who_waits_in_this_process_and_whoever_comes_after_is_told() -> None:
    members = make_gloo_threads(2)
    noticed = members[0].waiting = Noticed()

    def member(rank: int) -> str:
        if rank == 1:
            assert noticed.has_begun.wait(PATIENCE_S)
            members[0].abort()  # as the driver has it done, beside the thread that works
        with pytest.raises(PeerLostError) as lost:
            members[rank].all_reduce(torch.ones(1000))
        return str(lost.value)

    waiting, late = in_threads(2, member)
    assert waiting == "This member has left its group."
    assert late.startswith("Rank 1 of 2 lost a peer during all-reduce: ")
    for collective in members:
        collective.close()


@pytest.mark.parametrize("kind", ["gloo", "over_host"])
def test_the_drivers_word_ends_waits_for_a_member_that_is_stuck_and_the_others_meet_again(kind: BackendKind) -> None:
    """Get no error from the one that is stuck: it has its connections, as NCCL's dead seem to have."""
    store, backend = HashStore(), Backend(kind)

    def met(name: str, rank: int, size: int) -> Collective:
        return Collective.gloo(PrefixStore(name, store), rank, size, TIMEOUT_S, backend=backend)

    *others, stuck = in_threads(3, lambda rank: met("first", rank, 3))
    noticed = [Noticed(), Noticed()]
    for member, waiting in zip(others, noticed, strict=True):
        member.waiting = waiting

    def run(rank: int) -> float:
        if rank == 2:  # the driver
            assert all(waiting.has_begun.wait(PATIENCE_S) for waiting in noticed)
            for member in others:
                member.abort()
            return 0.0
        with pytest.raises(PeerLostError):
            others[rank].all_reduce(torch.ones(8))
        again, total = met("second", rank, 2), torch.ones(1)
        again.all_reduce(total)
        again.close()
        return total.item()

    assert in_threads(3, run) == [2.0, 2.0, 0.0]
    for member in (*others, stuck):
        member.close()


def test_abort_wakes_who_waits_for_the_others_to_connect_a_sibling() -> None:
    members = make_gloo_threads(2)
    store = members[0]._store
    assert store is not None

    def member(rank: int) -> None:
        if rank == 0:
            with pytest.raises(PeerLostError, match="left its group"):
                members[0].sibling("other")  # to which rank 1 never comes
            return
        deadline_s = time.monotonic() + PATIENCE_S
        while not PrefixStore("group/other", store).check(["arrived"]) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        members[0].abort()

    in_threads(2, member)
    for collective in members:
        collective.close()


def test_operations_of_a_sibling_have_the_time_of_those_of_the_group_whatever_connecting_has() -> None:
    def member(collective: Collective) -> timedelta:
        timeout: timedelta = collective.sibling("other")._group.options._timeout
        return timeout

    assert run_replicas(2, member) == [timedelta(seconds=TIMEOUT_S)] * 2


def test_a_replica_that_fails_is_the_one_that_is_reported() -> None:
    def member(collective: Collective) -> None:
        if collective.rank == 0:
            raise KeyError("mine")
        collective.barrier()

    with pytest.raises(KeyError, match="mine"):
        run_replicas(3, member)


MEMBERS = """
import json, os, signal, sys
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore
from orchestray.platform.comm.collective import Collective, PeerLostError

folder, size, registered = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "registered"
rank = 0
for other in range(1, size):  # one import of torch, then a process for every rank
    if os.fork() == 0:
        rank = other
        break
torch.set_num_threads(1)
store = FileStore(folder + "/store", size)
if registered:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    collective = Collective(dist.distributed_c10d._get_default_group())
else:
    collective = Collective.gloo(PrefixStore("first", store), rank, size, timeout_s=600.0)
collective.sibling("other").barrier()
collective.barrier()
if rank == 1:
    collective.start_all_reduce(torch.ones(1000))
    os.kill(os.getpid(), signal.SIGKILL)
try:
    for _ in range(3):
        collective.all_reduce(torch.ones(1 << 20))
    answer = "finished"
except PeerLostError as error:
    answer = str(error)
# The survivors, in the processes they have, meet again.
new_rank = {0: 0, 2: 1, 3: 2}[rank]
again = Collective.gloo(PrefixStore("second", store), new_rank, size - 1, timeout_s=600.0)
total = torch.ones(1)
again.all_reduce(total)
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump([answer, total.item(), dist.is_initialized()], file)
if rank == 0:
    for _ in range(size - 1):
        os.wait()
os._exit(0)
"""


@pytest.mark.parametrize("group", ["registered", "private"])
def test_a_process_killed_in_an_all_reduce_raises_peer_lost_on_all_survivors_and_they_meet_again(
    group: str, tmp_path: Path
) -> None:
    """Fail a survivor that waits: the group's timeout is ten minutes or more, that of the test far less."""
    with Forked(MEMBERS, str(tmp_path), "4", group) as members:
        assert members.wait() == 0, members.printed()
    for rank in (0, 2, 3):
        answer, total, initialized = json.loads((tmp_path / f"{rank}.json").read_text())
        assert answer.startswith(f"Rank {rank} of 4 lost a peer during all-reduce: ")
        assert total == 3.0
        assert not initialized, "the lost group is out of torch's registries"
