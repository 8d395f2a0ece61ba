"""A gradient that is zero in most rows of a few large parameters (`nn.Embedding(sparse=True)`), without those rows.

Rows are sent as runs of elements of the flat gradient of all parameters. A parameter with a dense gradient is one run,
neighbouring rows are one run, and a run costs 16 bytes besides its values. Ranges of keys with their values: Li et al.
2014, "Scaling Distributed Machine Learning with the Parameter Server", section 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_RUN_BYTES = 16


@dataclass(frozen=True)
class RowSparseGradient:
    """A flat tensor given by runs of its elements, zero elsewhere."""

    starts: Tensor
    """First element of each run: int64, `[runs]`, ascending; runs do not overlap."""
    lengths: Tensor
    """Number of elements of each run: int64, `[runs]`, above zero."""
    values: Tensor
    """Elements of all runs, `[sum of lengths]`."""

    @property
    def num_bytes(self) -> int:
        return self.starts.numel() * _RUN_BYTES + self.values.nbytes

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors of a message; `RowSparseGradient(*tensors)` makes the same gradient."""
        return [self.starts, self.lengths, self.values]

    def cut(self, first: int, last: int) -> RowSparseGradient:
        """Return the elements from `first` up to `last`, counted from `first`."""
        ends = self.starts + self.lengths
        starts, stops = self.starts.clamp(first, last), ends.clamp(first, last)
        lengths = stops - starts
        before = int((ends.clamp(max=first) - self.starts.clamp(max=first)).sum())
        is_there = lengths > 0
        values = self.values[before : before + int(lengths.sum())]
        return RowSparseGradient(starts[is_there] - first, lengths[is_there], values)

    def places(self) -> Tensor:
        """Return the index of each of the values in the flat tensor, int64, ascending."""
        ends = self.lengths.cumsum(0)
        shifts = self.starts - (ends - self.lengths)  # from the index of a value to its index in the flat tensor
        return torch.arange(self.values.numel()) + shifts.repeat_interleave(self.lengths)

    @torch.no_grad()
    def fill(self, into: Tensor) -> Tensor:
        """Write the flat tensor, with its zeros, to `into` and return it."""
        return into.zero_().index_copy_(0, self.places(), self.values)


def runs_of(gradients: Sequence[Tensor | None], sizes: Sequence[int], dtype: torch.dtype) -> RowSparseGradient | None:
    """Concatenate the gradients of parameters without the rows that sparse ones lack.

    Args:
        gradients: gradient of each parameter; None is zeros. They are not changed.
        sizes: number of elements of each parameter.
        dtype: dtype of the parameters.

    Returns:
        The gradient; None if no gradient is sparse, or leaving rows out would save no bytes.
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
    found = RowSparseGradient(torch.cat(starts), torch.cat(lengths), torch.cat(values))
    return found if found.num_bytes < begin * dtype.itemsize else None


def _merged(rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return starts and lengths of the runs that rows of `width` elements make (int64, ascending, all different)."""
    if not rows.numel():
        return rows, rows
    is_first = torch.ones_like(rows, dtype=torch.bool)
    is_first[1:] = rows[1:] != rows[:-1] + 1
    heads = is_first.nonzero()[:, 0]
    counts = torch.diff(heads, append=torch.tensor([rows.numel()]))
    return rows[heads] * width, counts * width


def zero_rows_left_out(
    flat: Tensor, shapes: Sequence[tuple[int, ...]], is_sparse: Sequence[bool]
) -> RowSparseGradient | None:
    """Return a sum of gradients without the rows that are all zero, in the parameters marked as sparse.

    Args:
        flat: gradient of all parameters, `[elements]`.
        shapes: shape of each parameter.
        is_sparse: True for each parameter with sparse gradients.

    Returns:
        The gradient; None in the same cases as for `runs_of`.
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
