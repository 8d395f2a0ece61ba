"""Conversion of Arrow columns to tensors, without a copy if their memory allows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from orchestray.platform.data.wide import LEAST_COLUMNS, WideTable
from orchestray.platform.errors import DataError

Column: TypeAlias = pa.Array | pa.ChunkedArray


class ColumnError(DataError):
    """Raised when a column cannot become a tensor."""

    def __init__(self, reason: str, column: Column, name: str | None) -> None:
        super().__init__(f"column '{name}' {reason}" if name else f"a column {reason}")
        self._reason = reason
        self._column = column
        self._name = name

    def __reduce__(self) -> tuple[type[DataError], tuple[str]]:
        return DataError, (str(self),)  # the data stays here

    def named_in(self, table: pa.Table) -> DataError:
        """Return the same error with the name of the column of `table` that shares its memory."""
        if self._name is None:
            own = _addresses(self._column)
            for name, column in zip(table.column_names, table.columns, strict=True):
                if own and own == _addresses(column):
                    return ColumnError(self._reason, self._column, name)
        return self


def to_tensor(column: Column, name: str | None = None) -> Tensor:
    """Return a column as a tensor, [rows, ...].

    Numbers give one dimension; lists of one length, even nested, and Arrow's fixed-shape tensors give more. The tensor
    shares the column's memory if that is in one piece, so writes to the tensor change the table. A column in several
    pieces, and one of booleans, is copied once.

    Args:
        column: numbers, booleans, or equally long lists of them. NaN is allowed, nulls are not.
        name: name of the column, for errors.

    Raises:
        DataError: the column has nulls, or values that cannot become a tensor.
    """
    array = in_one_piece(column)
    refuse_nulls(array, column, name)
    shape: list[int] = [len(array)]
    logical: Sequence[int] | None = None
    if isinstance(array.type, pa.FixedShapeTensorType):
        shape += array.type.shape
        logical = array.type.permutation
        array = array.storage.flatten()
        refuse_nulls(array, column, name)
    while _is_list(array.type):
        shape.append(_list_length(array, column, name))
        array = array.flatten()
        refuse_nulls(array, column, name)
    tensor = _numbers(array, column, name).reshape(shape)
    return tensor if logical is None else tensor.permute(0, *(axis + 1 for axis in logical))


def stack_columns(table: pa.Table, names: Sequence[str]) -> Tensor:
    """Return columns side by side as a float32 matrix, [rows, numbers of a row]; a single float32 one is not copied.

    Args:
        table: table of the columns.
        names: names of the columns, in the order of the result.

    Raises:
        DataError: same as in `to_tensor`, naming the column.
    """
    if len(names) == 1:
        return _flat_rows(to_tensor(table[names[0]], names[0])).to(torch.float32)
    if len(names) >= LEAST_COLUMNS and (side_by_side := _wide_matrix(table, names)) is not None:
        return torch.from_numpy(side_by_side)
    parts = [_as_matrix(table[name], name) for name in names]
    matrix = torch.empty(table.num_rows, sum(part.shape[1] for part in parts))
    values, start = matrix.numpy(), 0
    for part in parts:
        values[:, start : start + part.shape[1]] = part
        start += part.shape[1]
    return matrix


def _wide_matrix(table: pa.Table, names: Sequence[str]) -> NDArray[np.float32] | None:
    """Return very many columns of numbers side by side; None if they are to be stacked one by one."""
    if type(table) is WideTable:
        return table.matrix(names)
    selected = table.select(names)
    kinds = set(selected.schema.types)
    if any(pa.types.is_int64(kind) or pa.types.is_uint64(kind) for kind in kinds) and len(kinds) > 1:
        return None  # Arrow's common type would round twice
    try:
        (batch,) = selected.combine_chunks().to_batches()
        return np.ascontiguousarray(batch.to_tensor().to_numpy(), dtype=np.float32)
    except (pa.ArrowException, ValueError):  # nulls, say: the column is named when it is stacked by itself
        return None


def _as_matrix(column: pa.ChunkedArray, name: str) -> NDArray[np.generic]:
    """Return a column as [rows, numbers of a row]; plain numbers, the most frequent case, skip the tensor."""
    plain = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    if plain and column.num_chunks == 1 and not column.null_count:
        values: NDArray[np.generic] = column.chunk(0).to_numpy(zero_copy_only=True)
        return values[:, None]
    return _flat_rows(to_tensor(column, name)).numpy()


def _flat_rows(tensor: Tensor) -> Tensor:
    return tensor.flatten(1) if tensor.dim() > 1 else tensor.unsqueeze(1)


def in_one_piece(column: Column) -> pa.Array:
    """Return a column as one array."""
    if isinstance(column, pa.ChunkedArray):
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column


def refuse_nulls(array: pa.Array, column: Column, name: str | None) -> None:
    """Refuse an array of a column that has nulls."""
    if array.null_count:
        raise ColumnError(f"has {array.null_count} null(s), which no tensor can hold: fill or drop them", column, name)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _list_length(array: pa.Array, column: Column, name: str | None) -> int:
    """Return the common length of all lists of an array."""
    if pa.types.is_fixed_size_list(array.type):
        return int(array.type.list_size)
    lengths = np.diff(array.offsets.to_numpy())
    if not len(lengths):
        return 0
    if (lengths != lengths[0]).any():
        sizes = f"{lengths.min()} to {lengths.max()} values"
        reason = f"holds lists of {sizes}: pad or cut them to one length, as orchestray.pad_lists does"
        raise ColumnError(reason, column, name)
    return int(lengths[0])


def _numbers(array: pa.Array, column: Column, name: str | None) -> Tensor:
    kind = array.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return torch.from_dlpack(array)
    if pa.types.is_boolean(kind):  # one bit each in Arrow, one byte each in torch
        return torch.from_dlpack(array.cast(pa.uint8())).view(torch.bool)
    raise ColumnError(f"of type {kind} cannot become a tensor: {_advice(kind)}", column, name)


def _advice(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return (
            "map its values to numbers, for example with pyarrow.compute.index_in, or give .to_pylist() to a tokenizer "
            "and its answer to orchestray.pad_lists"
        )
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return "orchestray.decode_images reads images, and orchestray.pad_lists takes the bytes themselves"
    if pa.types.is_decimal(kind):
        return 'cast it, for example with .cast("float64")'
    if pa.types.is_temporal(kind):
        return 'cast it, for example with .cast("int64")'
    return "leave it out, or make numbers of it in to_batch"


def _addresses(column: Column) -> list[tuple[int, int]]:
    """Return the location of a column's values: (address, length of the piece) of each buffer of each piece."""
    pieces = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    return [(buffer.address, len(piece)) for piece in pieces for buffer in piece.buffers() if buffer is not None]
