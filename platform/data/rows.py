"""Rows held in memory, from which a batch is gathered by index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from orchestray.platform.data.order import Indices
from orchestray.platform.data.wide import LEAST_COLUMNS, Block, WideTable

Gather = Callable[[Indices], pa.Array]


class Rows:
    """A table with each column in one piece, ready for `take`.

    Columns of numbers, and of fixed-size lists or tensors of numbers, without nulls, are gathered by numpy. That is
    several times as fast as `pyarrow.Table.take` for the few rows of a batch. The others use `pyarrow.Array.take`. Very
    many columns of numbers of one type are gathered together, as a `WideTable`.
    """

    def __init__(self, table: pa.Table) -> None:
        table = without_views(table)
        self.num_rows: int = table.num_rows
        self._schema: pa.Schema = table.schema
        self._names: list[str] = table.column_names
        wide = _wide_kinds(self._schema, self._names)
        # Column by column, so that at most one exists both in pieces and in one piece.
        columns = table.columns[::-1]
        del table
        self._gathers: dict[int, Gather] = {}
        """Columns that are gathered by themselves, by their index."""
        together: dict[pa.DataType, list[int]] = {kind: [] for kind in wide}
        values: dict[pa.DataType, list[NDArray[np.generic]]] = {kind: [] for kind in wide}
        for index in range(len(columns)):
            column = _in_one_piece(columns.pop())
            view = _matrix(column) if column.type in wide and isinstance(column, pa.Array) else None
            if view is None:
                self._gathers[index] = _gather_of(column)
            else:
                together[column.type].append(index)
                values[column.type].append(view)
        self._blocks = [
            Block.of(kind, [self._names[index] for index in indices], values[kind])
            for kind, indices in together.items()
            if indices
        ]

    def take(self, indices: Indices) -> pa.Table:
        """Return the rows at `indices`, copied into memory of their own, each column in one piece."""
        gathered = {index: gather(indices) for index, gather in self._gathers.items()}
        if not self._blocks:
            return pa.Table.from_arrays(list(gathered.values()), schema=self._schema)
        others = {self._names[index]: pa.chunked_array([column]) for index, column in gathered.items()}
        return WideTable(self._schema, self._names, [block.take(indices) for block in self._blocks], others)

    def column(self, name: str) -> pa.Array | pa.ChunkedArray:
        """Return the values of a column that is not one of very many, in the order of the rows."""
        return self._gathers[self._names.index(name)](np.arange(self.num_rows))


def without_views(table: pa.Table) -> pa.Table:
    """Return a table without the types of which Arrow cannot take rows; text of `string_view` becomes `large_string`.

    Polars writes such text, also inside lists and structs.
    """
    kinds = [_without_views(kind) for kind in table.schema.types]
    for index, (field, kind) in enumerate(zip(table.schema, kinds, strict=True)):
        if kind != field.type:
            table = table.set_column(index, field.with_type(kind), table.column(index).cast(kind))
    return table


def _without_views(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_views(field.type)) for field in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        field = kind.value_field.with_type(_without_views(kind.value_type))
        if pa.types.is_fixed_size_list(kind):
            return pa.list_(field, kind.list_size)
        return pa.list_(field) if pa.types.is_list(kind) else pa.large_list(field)
    return kind


def _wide_kinds(schema: pa.Schema, names: list[str]) -> set[pa.DataType]:
    """Return the types of numbers that very many columns have."""
    if len(names) < LEAST_COLUMNS or len(set(names)) < len(names):
        return set()
    counts = Counter(schema.types)
    return {
        kind
        for kind, count in counts.items()
        if count >= LEAST_COLUMNS and (pa.types.is_integer(kind) or pa.types.is_floating(kind))
    }


def _in_one_piece(column: pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    if column.num_chunks == 1:
        return column.chunk(0)
    try:
        return column.combine_chunks()
    except pa.ArrowInvalid:  # texts of more than 2 GiB do not fit in one array
        return column


def _gather_of(column: pa.Array | pa.ChunkedArray) -> Gather:
    view = _matrix(column) if isinstance(column, pa.Array) else None
    if view is None:
        column = _from_its_start(column)
        return lambda indices: column.take(pa.array(indices))
    wrap = _wrapper(column.type)
    return lambda indices: wrap(view.take(indices, axis=0))


def _from_its_start(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return the column without an offset: Arrow takes wrong rows of nested fixed-size lists that have one."""
    if isinstance(column, pa.Array) and column.offset and pa.types.is_nested(column.type):
        return pa.concat_arrays([column, column.slice(0, 0)])
    return column


def _matrix(array: pa.Array) -> NDArray[np.generic] | None:
    """Return the array's numbers without a copy, [rows] or [rows, numbers of a row]; None if numpy cannot view them."""
    num_rows = len(array)
    while True:
        if isinstance(array.type, pa.FixedShapeTensorType):
            array = array.storage
        if array.null_count:
            return None
        if not pa.types.is_fixed_size_list(array.type):
            break
        array = array.flatten()
    if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
        return None
    flat: NDArray[np.generic] = array.to_numpy(zero_copy_only=True)
    if len(flat) == num_rows:
        return flat
    return flat.reshape(num_rows, -1) if num_rows else None


def _wrapper(kind: pa.DataType) -> Callable[[NDArray[np.generic]], pa.Array]:
    """Return a function that wraps numbers in an array of type `kind` without a copy."""
    if isinstance(kind, pa.FixedShapeTensorType):
        storage = _wrapper(kind.storage_type)
        return lambda values: pa.ExtensionArray.from_storage(kind, storage(values))
    if pa.types.is_fixed_size_list(kind):
        inner = _wrapper(kind.value_type)
        return lambda values: pa.FixedSizeListArray.from_arrays(inner(values), type=kind)
    return lambda values: pa.Array.from_buffers(kind, values.size, [None, pa.py_buffer(values)])
