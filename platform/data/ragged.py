"""Lists of different lengths as one tensor, with padding."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from orchestray.platform.data.tensors import Column, ColumnError, in_one_piece, refuse_nulls, to_tensor


class Padded(NamedTuple):
    """Lists of different lengths as one tensor."""

    values: Tensor
    """The lists, one a row, with padding behind: [rows, longest, ...]."""
    lengths: Tensor
    """Number of values of each row, padding excluded: [rows], int64."""

    @property
    def mask(self) -> Tensor:
        """True for a value, False for padding: [rows, longest]."""
        return torch.arange(self.values.shape[1]) < self.lengths[:, None]


def pad_lists(
    column: Column, *, value: float = 0, length: int | None = None, multiple_of: int = 1, name: str | None = None
) -> Padded:
    """Return lists of different lengths as one tensor, [rows, longest, ...], and their lengths.

    Args:
        column: lists of numbers, or of equally long lists of numbers; text and bytes count as lists of bytes (uint8).
            Neither a list nor a value may be null.
        value: value of the padding.
        length: length of every row; longer lists lose their end. None: that of the longest list.
        multiple_of: the length without `length` is rounded up to a multiple of this.
        name: name of the column, for errors.

    Raises:
        DataError: the column has nulls, or holds something else.
    """
    array = in_one_piece(column)
    refuse_nulls(array, column, name)
    lengths, values = _of_bytes(array) if _is_bytes(array.type) else _of_lists(array, column, name)
    longest = -(-int(lengths.max(initial=0)) // multiple_of) * multiple_of if length is None else length
    kept = np.minimum(lengths, longest)
    if (kept < lengths).any():
        place_in_list = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        values = values[torch.from_numpy(place_in_list < longest)]
    padded = torch.full((len(array), longest, *values.shape[1:]), value, dtype=values.dtype)
    result = Padded(padded, torch.from_numpy(kept))
    padded[result.mask] = values
    return result


def _of_lists(array: pa.Array, column: Column, name: str | None) -> tuple[np.ndarray, Tensor]:
    """Return the length of each list, and the values of all of them one after the other."""
    kind = array.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        raise ColumnError(f"of type {kind} holds no lists that could be padded", column, name)
    return pc.list_value_length(array).to_numpy().astype(np.int64), to_tensor(array.flatten(), name)


def _of_bytes(array: pa.Array) -> tuple[np.ndarray, Tensor]:
    texts = array.cast(pa.large_binary())
    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    everything = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    first, last = (int(ends[0]), int(ends[-1])) if len(texts) else (0, 0)
    return np.diff(ends) if len(texts) else np.zeros(0, np.int64), torch.from_numpy(everything[first:last].copy())


def _is_bytes(kind: pa.DataType) -> bool:
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    return bool(is_text or pa.types.is_binary(kind) or pa.types.is_large_binary(kind))
