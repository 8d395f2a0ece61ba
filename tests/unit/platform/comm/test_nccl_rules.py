"""The rules of support/nccl.py themselves: what they let pass, what they hold up, and what they leave undefined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from orchestray.platform.comm.collective import Collective
from orchestray.platform.sim.event_loop import DeadlockError
from support.nccl import Gpus, Group, MismatchError, run_on_gpus

SEEDS = range(20)


def groups(size: int, program: Callable[[Group, int], Any], *, seed: int, eager: bool = True) -> tuple[list[Any], Gpus]:
    """Run `program(group, rank)` on bare groups, without a collective around them."""
    gpus = Gpus(seed, eager=eager)
    started = [
        gpus.start_member(rank, lambda rank=rank: program(Group(gpus, "group", range(size), rank), rank))
        for rank in range(size)
    ]
    gpus.run()
    return [each.result for each in started], gpus


def number(value: float) -> Tensor:
    return torch.tensor([float(value)])


@pytest.mark.parametrize("eager", [True, False])
def test_receives_before_sends_on_both_sides_wait_for_ever(*, eager: bool) -> None:
    def program(group: Group, rank: int) -> None:
        works = [group.recv([number(0)], 1 - rank, 0), group.send([number(1)], 1 - rank, 0)]
        for work in works:
            work.wait()

    for seed in SEEDS:
        with pytest.raises(DeadlockError, match=r"member 0 of group.*: receive 1 .running., 1 behind it"):
            groups(2, program, seed=seed, eager=eager)


def test_sends_before_receives_on_both_sides_wait_for_ever_unless_one_is_buffered() -> None:
    def program(group: Group, rank: int) -> None:
        for work in [group.send([number(1)], 1 - rank, 0), group.recv([number(0)], 1 - rank, 0)]:
            work.wait()

    held = 0
    for seed in SEEDS:
        try:
            groups(2, program, seed=seed)
        except DeadlockError:
            held += 1
    assert 0 < held < len(SEEDS)


def test_a_send_and_a_receive_that_are_one_call_pass_in_any_order() -> None:
    def program(group: Group, rank: int) -> float:
        got = number(-1)
        group._start_coalescing()
        group.recv([got], 1 - rank, 0)
        group.send([number(rank)], 1 - rank, 0)
        group._end_coalescing().wait()
        return float(got)

    for seed in SEEDS:
        assert groups(2, program, seed=seed)[0] == [1.0, 0.0]


def test_a_group_that_does_not_know_its_device_makes_a_communicator_for_each_pair() -> None:
    def program(group: Group, rank: int) -> None:
        for source in range(3):
            for target in range(3):
                if rank == source != target:
                    group.send([number(1)], target, 0).wait()
                elif rank == target != source:
                    group.recv([number(0)], source, 0).wait()

    assert len(groups(3, program, seed=0, eager=False)[1].communicators) == 3
    assert len(groups(3, program, seed=0)[1].communicators) == 1


def test_an_operation_runs_behind_what_another_thread_of_its_member_has_waited_for() -> None:
    """Hold up one thread by what another waits for: the device has one stream for both, on any communicator."""
    size = 2

    def run(seed: int) -> None:
        gpus = Gpus(seed)

        def main(rank: int) -> None:
            one, other = (Group(gpus, name, range(size), rank) for name in ("one", "other"))

            def beside() -> None:
                (one if rank == 0 else other).barrier().wait()

            gpus.start_member(rank, beside)
            (other if rank == 0 else one).barrier().wait()

        for rank in range(size):
            gpus.start_member(rank, lambda rank=rank: main(rank))
        gpus.run()

    outcomes = set()
    for seed in SEEDS:
        try:
            run(seed)
            outcomes.add("passed")
        except DeadlockError:
            outcomes.add("held")
    assert "held" in outcomes


def test_kernels_that_have_room_for_one_wait_for_ever_where_members_start_them_in_different_orders() -> None:
    def member(collective: Collective) -> None:
        groups = collective.sibling("a"), collective.sibling("b")
        works = [group.start_all_reduce(torch.ones(1)) for group in (groups if collective.rank else groups[::-1])]
        for work in works:
            work.wait()

    for seed in SEEDS:
        run_on_gpus(2, member, seed=seed)
        with pytest.raises(DeadlockError, match="all-reduce"):
            run_on_gpus(2, member, seed=seed, room=1)


def test_different_collectives_at_the_same_place_are_found() -> None:
    def member(collective: Collective) -> None:
        collective.all_reduce(torch.ones(2 + collective.rank))

    with pytest.raises(MismatchError, match=r"operation 0 of group is .*all-reduce sum torch.float32 2"):
        run_on_gpus(2, member)


def test_collectives_give_what_those_of_torch_give() -> None:
    def member(collective: Collective) -> list[Any]:
        summed, most = torch.arange(4.0) * (collective.rank + 1), torch.tensor([collective.rank])
        collective.all_reduce(summed)
        collective.all_reduce(most, "max")
        part, whole = torch.empty(2), torch.arange(6.0)
        collective.start_reduce_scatter(part, whole).wait()
        collective.start_all_gather(whole, part).wait()
        rows = collective.all_gather(torch.tensor([collective.rank, 7]))
        said = torch.tensor([collective.rank + 5])
        collective.broadcast(said, 1)
        collective.barrier()
        return [summed.tolist(), most.tolist(), whole.tolist(), rows.tolist(), said.tolist()]

    expected = [[0.0, 6.0, 12.0, 18.0], [2], [0.0, 3.0, 6.0, 9.0, 12.0, 15.0], [[0, 7], [1, 7], [2, 7]], [6]]
    for seed in SEEDS:
        assert run_on_gpus(3, member, seed=seed)[0] == [expected] * 3


def test_a_wait_for_a_dead_peer_never_ends_until_an_abort_ends_it_with_an_undefined_result() -> None:
    def start(aborts: bool) -> Tensor:
        gpus = Gpus(3)
        found = torch.zeros(2)
        ends = {}

        def member(rank: int) -> None:
            group = ends[rank] = Group(gpus, "group", range(2), rank)
            if rank == 1:
                gpus.wait_for(gpus.sleep(50.0).future, "it computes")
            group.allreduce([found if rank == 0 else torch.ones(2)], torch.distributed.ReduceOp.SUM).wait()

        for rank in range(2):
            gpus.start_member(rank, lambda rank=rank: member(rank))
        gpus.at(5.0, lambda: gpus.kill_member(1))
        if aborts:
            gpus.at(1000.0, lambda: ends[0].abort())  # noqa: PLW0108 - it is not there yet
        gpus.run()
        return found

    with pytest.raises(DeadlockError, match="member 0 of group: all-reduce"):
        start(aborts=False)
    assert start(aborts=True).isnan().all()
