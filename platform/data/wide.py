"""Tables of very many columns of numbers, whose rows are gathered as one block instead of column by column."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from orchestray.platform.data.order import Indices

LEAST_COLUMNS = 256
"""Least number of columns of one type that are gathered as one block."""

_COPIED_AT_ONCE = 64


@dataclass(frozen=True)
class Block:
    """Columns of one type, in one piece of memory: of rows to gather from, or of the gathered rows."""

    kind: pa.DataType
    names: list[str]
    places: Mapping[str, int]
    """Index of each column by its name."""
    values: NDArray[np.generic]
    """The numbers: [rows, columns] to gather from, [columns, rows] once gathered."""

    @staticmethod
    def of(kind: pa.DataType, names: list[str], columns: list[NDArray[np.generic]]) -> Block:
        """Return the block of some columns; `columns` is empty afterwards, so that not all exist twice."""
        values = np.empty((len(columns[0]), len(columns)), columns[0].dtype)
        columns.reverse()
        for first in range(0, len(names), _COPIED_AT_ONCE):
            slab = [columns.pop() for _ in range(min(_COPIED_AT_ONCE, len(columns)))]
            values[:, first : first + len(slab)] = np.stack(slab, axis=1)
        return Block(kind, names, {name: index for index, name in enumerate(names)}, values)

    def take(self, indices: Indices) -> Block:
        """Return the rows at `indices`, in memory of their own."""
        rows = self.values.take(indices, axis=0)
        return Block(self.kind, self.names, self.places, np.ascontiguousarray(rows.T))

    def slice(self, start: int, stop: int) -> Block:
        """Return some of the gathered rows, in the same memory."""
        return Block(self.kind, self.names, self.places, self.values[:, start:stop])

    def column(self, name: str) -> pa.ChunkedArray:
        """Return a column of the gathered rows, in the same memory."""
        values = self.values[self.places[name]]
        return pa.chunked_array([pa.Array.from_buffers(self.kind, len(values), [None, pa.py_buffer(values)])])

    def matrix(self, names: Sequence[str]) -> NDArray[np.float32] | None:
        """Return columns of the gathered rows side by side, float32 [rows, columns]; None if one is not here."""
        first = self.places.get(names[0], len(self.names))
        if self.names[first : first + len(names)] == list(names):  # neighbours, which need not be looked up
            values = self.values[first : first + len(names)]
        else:
            places = [self.places.get(name, -1) for name in names]
            if min(places) < 0:
                return None
            values = self.values[places]
        return np.ascontiguousarray(values.T, dtype=np.float32)


class WideTable:
    """A stand-in for a `pyarrow.Table` of very many columns, which takes longer to make than a step of training.

    Names, single columns, `select`, `drop_columns`, `slice` and `orchestray.stack_columns` need no table. Everything
    else is done by a table, which is then made once. Functions of pyarrow that take a table need `pa.table(columns)`.
    """

    def __init__(
        self, schema: pa.Schema, names: list[str], blocks: Sequence[Block], others: Mapping[str, pa.ChunkedArray]
    ) -> None:
        """
        Args:
            schema: schema with a field for each name, and perhaps more.
            names: names of the columns, each once.
            blocks: columns in blocks.
            others: the other columns.
        """
        self._schema, self._names, self._blocks, self._others = schema, names, blocks, others
        self.num_rows: int = blocks[0].values.shape[1]

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class that `isinstance` shall see."""
        return pa.Table  # type: ignore[no-any-return]

    @property
    def column_names(self) -> list[str]:
        return list(self._names)

    @property
    def num_columns(self) -> int:
        return len(self._names)

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, len(self._names)

    @cached_property
    def schema(self) -> pa.Schema:
        if self._names == self._schema.names:
            return self._schema
        return pa.schema([self._schema.field(name) for name in self._names], self._schema.metadata)

    def __len__(self) -> int:
        return self.num_rows

    def column(self, key: str | int) -> pa.ChunkedArray:
        name = self._names[key] if isinstance(key, int) and 0 <= key < len(self._names) else key
        if name in self._known:
            if name in self._others:
                return self._others[name]
            return next(block for block in self._blocks if name in block.places).column(name)
        return self.table.column(key)  # raises the error that pyarrow would

    def __getitem__(self, key: Any) -> Any:
        return self.column(key) if isinstance(key, str | int) else self.table[key]

    def select(self, columns: Sequence[str | int]) -> Any:
        names = [self._names[key] if isinstance(key, int) else key for key in columns]
        if len(set(names)) < len(names) or not self._known.issuperset(names):
            return self.table.select(columns)
        return WideTable(self._schema, names, self._blocks, self._others)

    def drop_columns(self, columns: str | Sequence[str]) -> Any:
        dropped = {columns} if isinstance(columns, str) else set(columns)
        if not self._known.issuperset(dropped):
            return self.table.drop_columns(columns)
        names = [name for name in self._names if name not in dropped]
        return WideTable(self._schema, names, self._blocks, self._others)

    def slice(self, offset: int = 0, length: int | None = None) -> Any:
        if min(offset, length or 0) < 0:
            return self.table.slice(offset, length)  # raises the error that pyarrow would
        start = min(offset, self.num_rows)
        stop = self.num_rows if length is None else min(start + length, self.num_rows)
        blocks = [block.slice(start, stop) for block in self._blocks]
        others = {name: column.slice(start, stop - start) for name, column in self._others.items()}
        return WideTable(self._schema, self._names, blocks, others)

    def matrix(self, names: Sequence[str]) -> NDArray[np.float32] | None:
        """Return columns side by side, float32 [rows, columns]; None if they are not all in one block."""
        found = (block.matrix(names) for block in self._blocks)
        return next((matrix for matrix in found if matrix is not None), None)

    @cached_property
    def table(self) -> pa.Table:
        """The table itself, in the same memory."""
        return pa.Table.from_arrays([self.column(name) for name in self._names], schema=self.schema)

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self._names)

    def __getattr__(self, name: str) -> Any:
        if name in ("_schema", "_names", "_blocks", "_others"):  # not set yet, while the object is copied
            raise AttributeError(name)
        return getattr(self.table, name)

    def __eq__(self, other: object) -> bool:
        return bool(self.table == (other.table if type(other) is WideTable else other))

    __hash__ = None  # type: ignore[assignment]  # like a table

    def __iter__(self) -> Iterator[Any]:
        return iter(self.table.columns)

    def __repr__(self) -> str:
        return repr(self.table)

    def __reduce__(self) -> tuple[Any, ...]:
        return pa.table, (self.table,)


def plain(table: Any) -> pa.Table:
    """Return the table that something stands in for, or is."""
    return table.table if type(table) is WideTable else table
