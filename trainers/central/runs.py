"""A gradient that is zero in most rows of a few large parameters (`nn.Embedding(sparse=True)`), without those rows.

Rows travel as runs of elements of the flat gradient of all parameters: a parameter with a dense gradient is one run,
neighbouring rows are one run, and a run costs 16 bytes beside its values. Ranges of keys with their values: Li et al.
2014, "Scaling Distributed Machine Learning with the Parameter Server", section 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_RUN_BYTES = 16


@dataclass(frozen=True)
class Runs:
    """Elements of a flat tensor that is zero elsewhere."""

    starts: Tensor
    """int64, `[runs]`, ascending: the first element of each; runs do not overlap."""
    lengths: Tensor
    """int64, `[runs]`, above zero."""
    values: Tensor
    """`[sum of lengths]`."""

    @property
    def num_bytes(self) -> int:
        return self.starts.numel() * _RUN_BYTES + self.values.nbytes

    @property
    def tensors(self) -> list[Tensor]:
        """As a message; `Runs(*tensors)` makes the same of it."""
        return [self.starts, self.lengths, self.values]

    def cut(self, first: int, last: int) -> Runs:
        """Those elements from `first` up to `last`, counted from `first`."""
        ends = self.starts + self.lengths
        starts, stops = self.starts.clamp(first, last), ends.clamp(first, last)
        lengths = stops - starts
        before = int((ends.clamp(max=first) - self.starts.clamp(max=first)).sum())
        is_there = lengths > 0
        values = self.values[before : before + int(lengths.sum())]
        return Runs(starts[is_there] - first, lengths[is_there], values)

    def places(self) -> Tensor:
        """Where each of the values is, int64, ascending."""
        ends = self.lengths.cumsum(0)
        shifts = self.starts - (ends - self.lengths)  # of a run's places against those of its values
        return torch.arange(self.values.numel()) + shifts.repeat_interleave(self.lengths)

    @torch.no_grad()
    def fill(self, into: Tensor) -> Tensor:
        """Make `into` the flat tensor that these are the elements of; returns it."""
        return into.zero_().index_copy_(0, self.places(), self.values)


def runs_of(gradients: Sequence[Tensor | None], sizes: Sequence[int], dtype: torch.dtype) -> Runs | None:
    """The gradients of parameters, one after the other, without the rows that sparse ones have not.

    Args:
        gradients: of each parameter; None is zeros. None of them is changed.
        sizes: elements of each parameter.
        dtype: of the parameters.

    Returns:
        None where no gradient is sparse, or leaving rows out would save no bytes.
    """
    if not any(gradient is not None and gradient.layout == torch.sparse_coo for gradient in gradients):
        return None
    starts, lengths, values, begin = list[Tensor](), list[Tensor](), list[Tensor](), 0
    for gradient, size in zip(gradients, sizes, strict=True):
        if gradient is not None and size:
            if gradient.layout == torch.sparse_coo and gradient.sparse_dim() == 1:
                rows = gradient.coalesce()  # each row once
                first, length = _merged(rows.indices()[0].cpu(), rows.values()[:1].numel() or size)
                values.append(rows.values().reshape(-1))
            else:
                whole = gradient if gradient.layout == torch.strided else gradient.to_dense()
                first, length = torch.tensor([0]), torch.tensor([size])
                values.append(whole.reshape(-1))
            starts.append(first + begin)
            lengths.append(length)
        begin += size
    found = Runs(torch.cat(starts), torch.cat(lengths), torch.cat(values))
    return found if found.num_bytes < begin * dtype.itemsize else None


def _merged(rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Starts and lengths of the runs that rows (int64, ascending, all different) of so many elements make."""
    if not rows.numel():
        return rows, rows
    is_first = torch.ones_like(rows, dtype=torch.bool)
    is_first[1:] = rows[1:] != rows[:-1] + 1
    heads = is_first.nonzero()[:, 0]
    counts = torch.diff(heads, append=torch.tensor([rows.numel()]))
    return rows[heads] * width, counts * width


def zero_rows_left_out(flat: Tensor, shapes: Sequence[tuple[int, ...]], is_sparse: Sequence[bool]) -> Runs | None:
    """As `runs_of`, of a sum of gradients: of the parameters marked as sparse the rows that are all zero are left out.

    Args:
        flat: of all parameters, `[elements]`.
        shapes: of each parameter.
        is_sparse: for each, whether its gradients are.
    """
    sizes = [torch.Size(shape).numel() for shape in shapes]
    gradients = []
    for part, shape, sparse in zip(flat.split_with_sizes(sizes), shapes, is_sparse, strict=True):
        if not sparse:
            gradients.append(part)
            continue
        table = part.view(shape)
        rows = (table.flatten(1) != 0).any(1).nonzero()
        made = torch.sparse_coo_tensor(rows.T, table[rows[:, 0]], shape, is_coalesced=True, check_invariants=False)
        gradients.append(made)
    return runs_of(gradients, sizes, flat.dtype)
