"""Style `branches`: independent branches of a block on different workers.

The towers of AlexNet (Krizhevsky et al. 2012) and the paths of an Inception block (Szegedy et al. 2015) see the same
input and nothing of each other. Each worker holds and computes some of them. Workers communicate twice a block: when
the branches' outputs are merged, and, backward, when the gradients of their input are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from orchestray.platform.comm.collective import Collective
from orchestray.platform.errors import ConfigError
from orchestray.trainers.layout.tensor_slice import TensorSlice
from orchestray.trainers.parallel.tensor.functions import enter
from orchestray.trainers.parallel.tensor.parts import SplitModule, become, joined, keep
from orchestray.trainers.parallel.tensor.region import inner_name
from orchestray.trainers.parallel.tensor.shapes import meta_copy, meta_like

if TYPE_CHECKING:
    from orchestray.trainers.parallel.tensor.base import Split
    from orchestray.trainers.parallel.tensor.branch_tracing import Block

Merge = Literal["concat", "sum"]


class Branches(nn.Module):
    """Branches of the same input, merged.

    Args:
        branches: modules that each take one tensor.
        merge: "concat" along `dim`, or "sum".
        dim: dimension of the outputs to concatenate along.
    """

    def __init__(self, branches: Sequence[nn.Module], merge: Merge = "concat", dim: int = 1) -> None:
        super().__init__()
        if not branches:
            raise ValueError("there must be at least one branch")
        self.branches = nn.ModuleList(branches)
        self.merge = merge
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        outputs = [branch(x) for branch in self.branches]
        if self.merge == "concat":
            return torch.cat(outputs, self.dim)
        total: Tensor = outputs[0]
        for output in outputs[1:]:
            total = total + output
        return total


def split_branches(module: nn.Module, name: str, split: Split) -> None:
    """Assign the branches of a block to the workers.

    The block is a `Branches`, or any module whose `forward` can be traced by `torch.fx`. It calls independent branches
    of its one input and concatenates or adds their outputs. It may go on with the merged tensor.

    Raises:
        ConfigError: the module is not such a block.
    """
    from orchestray.trainers.parallel.tensor.branch_tracing import trace

    if isinstance(module, SplitModule):
        raise ConfigError(f"The plan splits the module {name!r} twice; give it one style.")
    plain = meta_copy(module)
    block = trace(module, name)
    owners = deal([_num_parameters(module, names) for names in block.modules], split.size)
    for names, owner in zip(block.modules, owners, strict=True):
        for inner in sorted(names):
            _keep_or_leave(module.get_submodule(inner), joined(name, inner), split, owner)
    become(module, _SplitBlock).work = _Work(split, block, block.on(plain), owners)


def is_block(module: nn.Module, name: str) -> bool:
    """Return True if a module has at least two branches with parameters, so that distributing them is worthwhile."""
    from orchestray.trainers.parallel.tensor.branch_tracing import trace

    if len(list(module.children())) < 2 and not isinstance(module, Branches):
        return False
    try:
        block = trace(module, name)
    except ConfigError:
        return False
    return sum(_num_parameters(module, names) > 0 for names in block.modules) > 1


def deal(costs: Sequence[int], num_workers: int) -> list[int]:
    """Return the worker of each branch: the costliest first, each to the least
    loaded worker (Graham 1969, longest first).
    """
    loads = [0] * num_workers
    counts = [0] * num_workers
    owners = [0] * len(costs)
    for branch in sorted(range(len(costs)), key=lambda branch: (-costs[branch], branch)):
        worker = min(range(num_workers), key=lambda worker: (loads[worker], counts[worker], worker))
        owners[branch] = worker
        loads[worker] += costs[branch]
        counts[worker] += 1
    return owners


def _num_parameters(module: nn.Module, names: set[str]) -> int:
    """Return the number of parameters of a branch: in a block, whose branches see
    images of one size, work grows with it.
    """
    return sum(parameter.numel() for name in names for parameter in module.get_submodule(name).parameters())


def _keep_or_leave(module: nn.Module, name: str, split: Split, owner: int) -> None:
    """Keep a branch's module if this worker owns it; otherwise empty it."""
    for inner, part in module.named_modules():
        full_name = inner_name(name, inner)
        cast(Any, part).splits_rows = True  # the worker that computes it has all rows, and the others none
        tensors = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        for tensor_name, tensor in tensors:
            piece_name = joined(full_name, tensor_name)
            if owner != split.rank and tensor.dim():
                keep(part, full_name, split, tensor_name, 0)
            elif tensor_name not in part._non_persistent_buffers_set:
                split.pieces[piece_name] = TensorSlice.whole(piece_name, tensor.shape, is_counted=owner == split.rank)


@dataclass
class _Work:
    """The branches of a block and the worker of each."""

    split: Split
    block: Block
    plain: list[nn.Module]
    """Branches on the meta device: they give the shapes of what other workers compute."""
    owners: list[int]
    shapes: dict[tuple[int, ...], list[tuple[int, ...]]] = field(default_factory=dict)

    def __call__(self, x: Tensor) -> Tensor:
        group, rank = self.split.group(), self.split.rank
        shapes = self._shapes(x)
        entered = enter(x, self.split.group)
        own = [index for index, owner in enumerate(self.owners) if owner == rank]
        outputs = [self.block.branches[index](entered) for index in own]
        for index, output in zip(own, outputs, strict=True):
            if tuple(output.shape) != shapes[index]:
                raise ConfigError(
                    f"A branch gave a tensor of shape {list(output.shape)} where {list(shapes[index])} was to be "
                    "expected: branches on several workers must compute shapes from the input's shape alone."
                )
        meeting = _Meeting(group, self.owners, shapes, self.block.dim, _dtype(x))
        # Makes a worker without a branch, or without trainable branches, go backward with the others.
        anchor = torch.zeros((), device=x.device, requires_grad=torch.is_grad_enabled())
        merge: Any = _Added if self.block.merge == "sum" else _Concatenated
        merged = merge.apply(meeting, anchor, None if outputs else entered, *outputs)
        return cast(Tensor, self.block.tail(merged))

    def _shapes(self, x: Tensor) -> list[tuple[int, ...]]:
        key = tuple(x.shape)
        if key not in self.shapes:
            with torch.no_grad():
                self.shapes[key] = [tuple(branch(meta_like(x, branch)).shape) for branch in self.plain]
        return self.shapes[key]


class _SplitBlock(SplitModule):
    """A block of which this worker computes some branches."""

    work: _Work

    def forward(self, x: Tensor) -> Tensor:
        return self.work(x)


@dataclass
class _Meeting:
    """The shapes and owners of all branches' outputs, known to every worker when outputs are merged."""

    group: Collective
    owners: list[int]
    shapes: list[tuple[int, ...]]
    dim: int
    dtype: torch.dtype

    def part(self, worker: int, like: Tensor) -> Tensor:
        """Allocate memory for what a worker sends: its branches' outputs, one after another."""
        sizes = [torch.Size(self.shapes[index]).numel() for index, owner in enumerate(self.owners) if owner == worker]
        return torch.empty(sum(sizes), dtype=self.dtype, device=like.device)

    def unpacked(self, worker: int, part: Tensor) -> dict[int, Tensor]:
        """Split a worker's memory into its outputs, by branch."""
        found, start = {}, 0
        for index, owner in enumerate(self.owners):
            if owner == worker:
                size = torch.Size(self.shapes[index]).numel()
                found[index] = part[start : start + size].view(self.shapes[index])
                start += size
        return found


class _Concatenated(torch.autograd.Function):
    """A concatenation for which every worker sends its outputs to every other; nothing is sent backward."""

    @staticmethod
    def forward(ctx: Any, meeting: _Meeting, anchor: Tensor, absent: Tensor | None, *outputs: Tensor) -> Tensor:
        ctx.meeting, ctx.absent_shape = meeting, None if absent is None else absent.shape
        group = meeting.group
        peers = [worker for worker in range(group.size) if worker != group.rank]
        own = meeting.part(group.rank, anchor)
        for memory, output in zip(meeting.unpacked(group.rank, own).values(), outputs, strict=True):
            memory.copy_(output)
        parts = {worker: own if worker == group.rank else meeting.part(worker, anchor) for worker in range(group.size)}
        group.start_exchange(dict.fromkeys(peers, own), {worker: parts[worker] for worker in peers}).wait()
        branches: dict[int, Tensor] = {}
        for worker, part in parts.items():
            branches.update(meeting.unpacked(worker, part))
        return torch.cat([branches[index] for index in range(len(meeting.owners))], meeting.dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        meeting: _Meeting = ctx.meeting
        parts = torch.split(dy, [shape[meeting.dim] for shape in meeting.shapes], meeting.dim)
        own = [part for part, owner in zip(parts, meeting.owners, strict=True) if owner == meeting.group.rank]
        return (None, None, _nothing(ctx, dy), *own)


class _Added(torch.autograd.Function):
    """A sum with one all-reduce; nothing is sent backward."""

    @staticmethod
    def forward(ctx: Any, meeting: _Meeting, anchor: Tensor, absent: Tensor | None, *outputs: Tensor) -> Tensor:
        ctx.num_outputs, ctx.absent_shape = len(outputs), None if absent is None else absent.shape
        shape: torch.Size = cast(Any, torch.broadcast_shapes)(*meeting.shapes)
        total = torch.zeros(shape, dtype=meeting.dtype, device=anchor.device)
        for output in outputs:
            total += output
        ctx.shapes = [output.shape for output in outputs]
        meeting.group.all_reduce(total)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, _nothing(ctx, dy), *(dy.sum_to_size(shape) for shape in ctx.shapes))


def _nothing(ctx: Any, dy: Tensor) -> Tensor | None:
    """Return the gradient of the block's input on a worker without a branch."""
    return None if ctx.absent_shape is None else dy.new_zeros(ctx.absent_shape)


def _dtype(x: Tensor) -> torch.dtype:
    """Return the type of the branches' outputs; with autocast the lower one, which convolutions and products return."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
