"""The backends that carry tensors between processes: which of them this torch has, and what the one in use can do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.thread_group import run_members
from orchestray.trainers.survey.lab.exhibit import Exhibit

TYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
MEMBERS = 3
KINDS = ("right", "not defined", "refused", "wrong")
_PART = 4
"""Numbers of each member in a part."""
_ROOT = 1


@dataclass(frozen=True)
class Meaning:
    """An operation, and what the standard of MPI says of it.

    Args:
        standard: its name there.
        run: makes a member's result from its own numbers.
        means: returns what it should be, from all members' numbers and its rank.
        undefined: types of numbers for which the standard does not define it.
    """

    standard: str
    run: Callable[[Collective, Tensor], Tensor]
    means: Callable[[Sequence[Tensor], int], Tensor]
    undefined: frozenset[torch.dtype] = frozenset()


def _all_reduce(operation: Any, group: Collective, own: Tensor) -> Tensor:
    group.all_reduce(own, operation)
    return own


def _reduce_scatter(group: Collective, own: Tensor) -> Tensor:
    part = own.new_empty(_PART)
    group.start_reduce_scatter(part, own).wait()
    return part


def _broadcast(group: Collective, own: Tensor) -> Tensor:
    group.broadcast(own, _ROOT)
    return own


def _all_to_all(group: Collective, own: Tensor) -> Tensor:
    parts = own.chunk(group.size)
    others = [rank for rank in range(group.size) if rank != group.rank]
    received = {rank: own.new_empty(_PART) for rank in others} | {group.rank: parts[group.rank]}
    group.start_exchange({rank: parts[rank] for rank in others}, {rank: received[rank] for rank in others}).wait()
    return torch.cat([received[rank] for rank in range(group.size)])


def _part(whole: Tensor, rank: int) -> Tensor:
    return whole[rank * _PART : (rank + 1) * _PART]


_NO_SUM = frozenset({torch.bool})
OPERATIONS: Mapping[str, Meaning] = {
    "all_reduce, sum": Meaning(
        "MPI_Allreduce, MPI_SUM",
        partial(_all_reduce, "sum"),
        lambda all_of, _: torch.stack([*all_of]).sum(0),
        _NO_SUM,
    ),
    "all_reduce, max": Meaning(
        "MPI_Allreduce, MPI_MAX",
        partial(_all_reduce, "max"),
        lambda all_of, _: torch.stack([*all_of]).amax(0),
        frozenset({torch.complex64}),
    ),
    "reduce_scatter": Meaning(
        "MPI_Reduce_scatter_block",
        _reduce_scatter,
        lambda all_of, rank: _part(torch.stack([*all_of]).sum(0), rank),
        _NO_SUM,
    ),
    "all_gather": Meaning(
        "MPI_Allgather", lambda group, own: group.all_gather(own).flatten(), lambda all_of, _: torch.cat([*all_of])
    ),
    "broadcast": Meaning("MPI_Bcast", _broadcast, lambda all_of, _: all_of[_ROOT]),
    "exchange": Meaning(
        "MPI_Alltoall", _all_to_all, lambda all_of, rank: torch.cat([_part(each, rank) for each in all_of])
    ),
}


def backends(rounds: int = 0) -> Exhibit:
    """Try each operation on numbers of each type over gloo, against its meaning in the standard of MPI."""
    del rounds
    rows: list[list[Any]] = []
    for name, operation in OPERATIONS.items():
        found = {str(dtype).removeprefix("torch."): _try(operation, dtype) for dtype in TYPES}
        kinds = (" ".join(each for each in found if found[each] == kind) or None for kind in KINDS)
        rows.append(["gloo", name, operation.standard, *kinds])
    num_right = sum(row[-2:] == [None, None] for row in rows)
    has = {
        "mpi": dist.is_mpi_available(),
        "nccl": dist.is_nccl_available() and torch.cuda.is_available(),
        "ucc": dist.is_ucc_available(),
    }
    rows += [[name, "not tried" if there else "not here", *[None] * (1 + len(KINDS))] for name, there in has.items()]
    absent = " or ".join(name for name, there in has.items() if not there)
    findings = [
        f"gloo does {num_right} of {len(OPERATIONS)} operations as MPI defines them, among {MEMBERS} members.",
        *([f"This torch, on this machine, has no {absent}; nothing is said of what was not tried."] if absent else []),
    ]
    columns = ["backend", "operation", "in MPI", *(f"{kind} for" for kind in KINDS)]
    return Exhibit("backends", "What carries tensors between processes", columns, rows, findings)


def _try(operation: Meaning, dtype: torch.dtype) -> str:
    """Return what members get of an operation, as one of `KINDS`."""
    if dtype in operation.undefined:
        return "not defined"
    all_of = [_numbers(rank, dtype) for rank in range(MEMBERS)]
    try:
        results = run_members(MEMBERS, lambda group: operation.run(group, all_of[group.rank].clone()))
    except (RuntimeError, TypeError, ValueError):
        return "refused"
    means = [operation.means(all_of, rank).to(dtype) for rank in range(MEMBERS)]
    return "right" if all(map(torch.equal, results, means)) else "wrong"


def _numbers(rank: int, dtype: torch.dtype) -> Tensor:
    """Return a member's numbers, whose sums are exact in every type."""
    return (torch.arange(MEMBERS * _PART) * (rank + 1) % 5).to(dtype)
