"""Members that share a GPU: what they send goes over host memory, and gives what gloo gives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.over_host import OverHost
from orchestray.platform.comm.process_groups import Backend, connect
from orchestray.platform.comm.thread_group import in_threads

SIZE = 3


class Far(Tensor):
    """A tensor of the CPU that counts as one of a GPU: gloo must never get it."""


def far(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Far)


class OnlyNear:
    """A gloo group that refuses tensors that are far, as it would refuse those of a GPU."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._group, name)

        def checked(*arguments: Any) -> Any:
            assert "Far" not in repr([type(each) for each in _flat(arguments)])
            return operation(*arguments)

        return checked


def _flat(value: Any) -> list[Any]:
    return [inner for each in value for inner in _flat(each)] if isinstance(value, list | tuple) else [value]


def every_operation(member: Collective, place: Any) -> list[list[float]]:
    rank, size = member.rank, member.size
    summed, part, whole = place(torch.arange(4.0) + rank), place(torch.zeros(2)), place(torch.arange(2.0 * size))
    member.all_reduce(summed)
    pending = member.start_reduce_scatter(part, whole)
    pending.wait()
    gathered = place(torch.zeros(2 * size))
    member.start_all_gather(gathered, part).wait()
    rows = member.all_gather(place(torch.tensor([rank + 0.5])))
    said = place(torch.tensor([float(rank)]))
    member.broadcast(said, 1)
    got = place(torch.zeros(2))
    member.start_exchange({(rank + 1) % size: place(torch.full((2,), float(rank)))}, {(rank - 1) % size: got}).wait()
    return [each.flatten().tolist() for each in (summed, part, gathered, rows, said, got)]


def found(place: Any) -> list[list[list[float]]]:
    store = HashStore()

    def run(rank: int) -> list[list[float]]:
        group = connect(PrefixStore("over-host", store), rank, SIZE, 60.0, backend=Backend("over_host"))
        member = Collective(OverHost(OnlyNear(group.inner), lambda tensor: isinstance(tensor, Far)))
        try:
            return every_operation(member, place)
        finally:
            member.barrier()
            member.close()

    return in_threads(SIZE, run)


def test_operations_on_tensors_that_gloo_cannot_take_give_what_they_give_on_those_of_the_host() -> None:
    on_host = found(lambda tensor: tensor)
    assert found(far) == on_host
    assert on_host[0][0] == [3.0, 6.0, 9.0, 12.0]
    assert on_host[2][5] == [1.0, 1.0]


def test_a_result_arrives_with_the_wait_and_not_before() -> None:
    class Slow:
        """A work whose result comes when it is waited for."""

        def __init__(self, into: Tensor) -> None:
            self._into = into

        def wait(self) -> None:
            self._into.fill_(7.0)

    class Group:
        def recv(self, tensors: list[Tensor], _peer: int, _tag: int) -> Slow:
            return Slow(tensors[0])

    into = far(torch.zeros(2))
    work = OverHost(Group(), lambda tensor: isinstance(tensor, Far)).recv([into], 0, 0)
    assert into.tolist() == [0.0, 0.0]
    work.wait()
    assert into.tolist() == [7.0, 7.0]
