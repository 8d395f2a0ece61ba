"""A process group of one real member: the others are imagined, and each operation is noted instead of sent.

A dry run of a worker takes the time of its own computation, with the product's own code in between. What its operations
would take is added from the noted calls and a model of the network (see `trainers.planning`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.distributed import ReduceOp

from orchestray.platform.comm.collective import Collective


@dataclass
class Call:
    """An operation of a dry run.

    Args:
        kind: `all_reduce`, `all_gather`, `reduce_scatter`, `broadcast`, `send`, `receive` or `barrier`.
        group: name of the group, which is the path of its collective.
        size: number of members of the group.
        num_bytes: bytes of the whole tensor: that is reduced, gathered from all members, scattered or sent.
        began_s: `time.perf_counter` at its start.
        waited_s: `time.perf_counter` when its result was first waited for; None: it never was.
    """

    kind: str
    group: str
    size: int
    num_bytes: int
    began_s: float = field(default_factory=time.perf_counter)
    waited_s: float | None = None


class _Work:
    """The handle of an operation that is done at once."""

    __slots__ = ("_call",)

    def __init__(self, call: Call) -> None:
        self._call = call

    def wait(self, *_: object) -> None:
        if self._call.waited_s is None:
            self._call.waited_s = time.perf_counter()


class _DryGroup:
    """The group of a dry collective: the operations of a backend's group. What others would send is this member's own.

    So sums are those of this member alone, and what is gathered is its part again: values are not those of a run, but
    their shapes and the time to use them are.
    """

    supports_coalescing = False

    def __init__(self, rank: int, size: int, path: str, calls: list[Call]) -> None:
        self._rank, self._size, self._path, self._calls = rank, size, path, calls
        self._receiving: list[Tensor] = []
        """Tensors whose sender is imagined: they get what this member sends next if that is of one form, else zeros."""

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def abort(self) -> None:
        return

    def allreduce(self, tensors: Sequence[Tensor], _operation: object) -> _Work:
        return self._note("all_reduce", tensors[0].nbytes)

    def allgather(self, rows: Sequence[Sequence[Tensor]], own: Sequence[Tensor]) -> _Work:
        for row in rows[0]:
            row.copy_(own[0])
        return self._note("all_gather", own[0].nbytes * self._size)

    def _reduce_scatter_base(self, part: Tensor, whole: Tensor) -> _Work:
        part.copy_(whole.narrow(0, self._rank * part.numel(), part.numel()))
        return self._note("reduce_scatter", whole.nbytes)

    def _allgather_base(self, whole: Tensor, part: Tensor) -> _Work:
        whole.view(self._size, -1).copy_(part.clone().view(1, -1).expand(self._size, -1))
        return self._note("all_gather", whole.nbytes)

    def send(self, tensors: Sequence[Tensor], _peer: int, _tag: int) -> _Work:
        sent = tensors[0].view(-1)
        for received in self._receiving:
            if received.dtype == sent.dtype and received.numel() == sent.numel():
                received.copy_(sent)
        self._receiving = []
        return self._note("send", tensors[0].nbytes)

    def recv(self, tensors: Sequence[Tensor], _peer: int, _tag: int) -> _Work:
        self._receiving.append(tensors[0].zero_().view(-1))
        return self._note("receive", tensors[0].nbytes)

    def broadcast(self, raw: Tensor, _source: int) -> _Work:
        return self._note("broadcast", raw.nbytes)

    def barrier(self) -> _Work:
        return self._note("barrier", 0)

    def _note(self, kind: str, num_bytes: int) -> _Work:
        call = Call(kind, self._path, self._size, num_bytes)
        self._calls.append(call)
        return _Work(call)


class DryCollective(Collective):
    """A member of a group whose other members are imagined.

    Args:
        rank: rank of this member.
        size: number of members.
        calls: receives every operation, of its siblings and subgroups too.
        path: name of the group.
    """

    def __init__(self, rank: int, size: int, calls: list[Call], *, path: str = "group") -> None:
        super().__init__(_DryGroup(rank, size, path, calls), path=path)
        self._calls = calls

    def _connect_relative(self, path: str, ranks: list[int]) -> Collective:
        return DryCollective(ranks.index(self.rank), len(ranks), self._calls, path=path)


class _RepeatedGroup(_DryGroup):
    """The group of members of which the first are real, and the others do as these do, over and over."""

    def __init__(self, real: Collective, size: int, calls: list[Call]) -> None:
        super().__init__(real.rank, size, real._path, calls)
        self._real, self._times = real, size // real.size

    def allreduce(self, tensors: Sequence[Tensor], operation: object) -> _Work:
        is_sum = operation == ReduceOp.SUM
        self._real.all_reduce(tensors[0], "sum" if is_sum else "max")
        if is_sum:
            tensors[0].mul_(self._times)
        return super().allreduce(tensors, operation)

    def allgather(self, rows: Sequence[Sequence[Tensor]], own: Sequence[Tensor]) -> _Work:
        found = self._real.all_gather(own[0])
        for index, row in enumerate(rows[0]):
            row.copy_(found[index % self._real.size])
        return self._note("all_gather", own[0].nbytes * self._size)

    def broadcast(self, raw: Tensor, source: int) -> _Work:
        self._real.broadcast(raw, source % self._real.size)
        return super().broadcast(raw, source)

    def barrier(self) -> _Work:
        self._real.barrier()
        return super().barrier()

    def abort(self) -> None:
        self._real.abort()


class FirstMembers(Collective):
    """A member of a group of which the first ones are real, and imagined ones do as these do, over and over.

    Subgroups of real members alone are real. In one that has a single real member, all others are imagined.

    Args:
        real: connected group of the first members.
        size: number of all members, a multiple of the real ones.
        calls: receives every operation with members that are imagined.
    """

    def __init__(self, real: Collective, size: int, calls: list[Call]) -> None:
        super().__init__(_RepeatedGroup(real, size, calls), real._store, real.timeout_s, path=real._path)
        self._real, self._calls = real, calls

    def _connect_relative(self, path: str, ranks: list[int]) -> Collective:
        real = [rank for rank in ranks if rank < self._real.size]
        if len(real) == 1:
            return DryCollective(ranks.index(self.rank), len(ranks), self._calls, path=path)
        group = self._real._connect_relative(path, real)
        return group if real == ranks else FirstMembers(group, len(ranks), self._calls)


def imagine_the_others(collective: Collective, calls: list[Call]) -> None:
    """Note the operations of a connected collective from now on, and of its family, instead of sending them.

    For what can only be built among real members, who have left or wait by now.

    Args:
        collective: a collective with its siblings and subgroups.
        calls: receives every operation.
    """
    for member in collective._family:
        member._failure = None  # they left before
        member._group = _DryGroup(member.rank, member.size, member._path, calls)
        later = DryCollective(member.rank, member.size, calls, path=member._path)
        setattr(member, "_connect_relative", later._connect_relative)  # noqa: B010 - for groups made later
