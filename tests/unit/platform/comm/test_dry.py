"""A collective with imagined peers notes what a connected one would send, and waits for nobody."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.dry import Call, DryCollective, FirstMembers, imagine_the_others
from orchestray.platform.comm.thread_group import run_members


def _all_reduce(group: Collective) -> None:
    group.all_reduce(torch.ones(7))


def _all_gather(group: Collective) -> None:
    group.all_gather(torch.ones(3, 2))
    group.start_all_gather(torch.ones(4 * group.size), torch.ones(4)).wait()


def _reduce_scatter(group: Collective) -> None:
    group.start_reduce_scatter(torch.ones(5), torch.ones(5 * group.size)).wait()


def _broadcast(group: Collective) -> None:
    group.broadcast(torch.ones(9), 0)
    group.barrier()


def _exchange(group: Collective) -> None:
    left, right = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    group.start_exchange({right: torch.ones(6)}, {left: torch.ones(6)}).wait()


def _in_groups(group: Collective) -> None:
    _all_reduce(group.sibling("sums"))
    _all_reduce(group.subgroup("first two", [0, 1]) if group.rank < 2 else group)


OPERATIONS = (_all_reduce, _all_gather, _reduce_scatter, _broadcast, _exchange)


@pytest.mark.parametrize("operate", OPERATIONS)
@pytest.mark.parametrize("size", [2, 3])
def test_it_counts_the_bytes_that_a_connected_member_sends(operate: Callable[[Collective], None], size: int) -> None:
    def member(group: Collective) -> int:
        operate(group)
        return group.bytes_sent

    dry = DryCollective(0, size, [])
    operate(dry)
    assert dry.bytes_sent == run_members(size, member)[0] > 0


def test_it_notes_kind_size_and_whole_bytes_of_each_operation() -> None:
    calls: list[Call] = []
    group = DryCollective(1, 4, calls)
    for operate in OPERATIONS:
        operate(group)
    noted = [(call.kind, call.size, call.num_bytes) for call in calls]
    assert noted == [
        ("all_reduce", 4, 28),
        ("all_gather", 4, 96),
        ("all_gather", 4, 64),
        ("reduce_scatter", 4, 80),
        ("broadcast", 4, 36),
        ("barrier", 4, 0),
        ("receive", 4, 24),
        ("send", 4, 24),
    ]
    assert all(call.waited_s is not None and call.waited_s >= call.began_s for call in calls)


def test_siblings_and_subgroups_note_their_operations_under_their_names() -> None:
    calls: list[Call] = []
    _in_groups(DryCollective(0, 3, calls))
    assert [(call.group, call.size) for call in calls] == [("group/sums", 3), ("group/first two", 2)]


def test_what_is_gathered_has_the_values_of_this_member_in_every_place() -> None:
    gathered = DryCollective(0, 3, []).all_gather(torch.tensor([2.0, 5.0]))
    assert gathered.tolist() == [[2.0, 5.0]] * 3


def test_what_is_received_is_what_this_member_sends() -> None:
    received = torch.zeros(2)
    DryCollective(0, 2, []).start_exchange({1: torch.tensor([1.0, 2.0])}, {1: received}).wait()
    assert received.tolist() == [1.0, 2.0]


def test_a_connected_group_goes_on_without_its_other_members() -> None:
    groups = run_members(2, lambda group: (group, group.sibling("sums")))
    group, sums = groups[0]
    calls: list[Call] = []
    imagine_the_others(group, calls)
    for each in (group, sums, group.sibling("made later")):
        each.all_reduce(torch.ones(1))
    assert [call.group for call in calls] == ["group", "group/sums", "group/made later"]


def test_members_beyond_the_first_ones_do_as_these_do() -> None:
    def member(real: Collective) -> tuple[list[float], list[float], list[float]]:
        group = FirstMembers(real, 4, [])
        own = torch.tensor([float(real.rank)])
        total, largest, given = torch.ones(1) + own, own.clone(), own.clone()
        group.all_reduce(total)
        group.sibling("largest").all_reduce(largest, "max")
        group.broadcast(given, 3)
        return group.all_gather(own).flatten().tolist(), [total.item(), largest.item()], given.tolist()

    assert run_members(2, member) == [([0.0, 1.0, 0.0, 1.0], [6.0, 1.0], [1.0])] * 2


def test_subgroups_of_the_first_members_are_real_and_those_with_one_of_them_are_imagined() -> None:
    def member(real: Collective) -> tuple[float, float, list[str], dict[str, int]]:
        calls: list[Call] = []
        group = FirstMembers(real, 4, calls)
        inside, across = group.subgroup("model", [0, 1]), group.subgroup("data", [real.rank, real.rank + 2])
        sums = torch.ones(2)
        inside.all_reduce(sums[:1])
        across.all_reduce(sums[1:])
        imagined = [call.group for call in calls]
        group.close()
        return sums[0].item(), sums[1].item(), imagined, group.bytes_by_group

    sent = {"group": 0, "group/model": 4, "group/data": 4}
    assert run_members(2, member) == [(2.0, 1.0, ["group/data"], sent)] * 2
