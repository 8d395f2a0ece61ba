"""Several sources mixed by weights, in an order that depends on the seed alone.

The samples of a run are numbered through all epochs. They are drawn in cycles of 65,536: in each, every source has its
share, at random places. The draws of a source walk through its rows in passes, each in an order of its own. So a
division tells how many rows of a source are drawn before a sample, and a run can go on at any step.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from orchestray.platform.data.order import Indices, random_permutation
from orchestray.platform.data.rows import Rows
from orchestray.platform.data.wide import plain
from orchestray.platform.data.window_cache import WindowCache
from orchestray.platform.errors import DataError, TaskError

if TYPE_CHECKING:
    import pyarrow.dataset as ds

    from orchestray.platform.data.source import Source, Streamed

CYCLE = 65536
"""Number of samples in which each source has its share, up to one sample."""

_CYCLE, _SOURCE = 3, 4
"""Purposes of these draws, beside those of `order.py` and `draws.py`."""


@dataclass(frozen=True)
class Mix:
    """Several tables or datasets with the same columns, mixed by weights.

    A source with a weight above its share of the rows is used several times an epoch, one with less only in part; the
    next epoch goes on where the last one ended.
    """

    parts: Sequence[pa.Table | ds.Dataset | Streamed]
    weights: Sequence[float]
    """Weights of the parts, above 0; only their proportions count."""
    num_rows: int | None = None
    """Number of samples of an epoch; None: as many as all parts have rows."""


class MixedSource:
    """A source of mixed rows; see `Mix`."""

    def __init__(self, parts: Sequence[Source], weights: Sequence[float], num_rows: int | None) -> None:
        """
        Args:
            parts: sources of the parts.
            weights: weights of the parts.
            num_rows: number of samples of an epoch; None: as many as all parts have rows.

        Raises:
            TaskError: the weights do not fit the parts.
            DataError: the parts differ in their columns, or have two of one name.
        """
        self._parts = list(parts)
        self.counts = counts_of(weights, len(parts))
        if num_rows is not None and num_rows < 1:
            raise TaskError(f"Mix(num_rows={num_rows}) has an epoch without samples: it must be 1 or more, or None")
        self._num_rows = sum(part.num_rows for part in parts) if num_rows is None else num_rows
        first = parts[0].first_row().schema
        if len(set(first.names)) < len(first):
            raise DataError(f"the parts of a Mix must have columns with different names, got {_shown(first)}")
        self._schema = pa.schema([(field.name, field.type) for field in first])
        """Names and types of the columns, in the order of the first part; any may have nulls."""
        for number, part in enumerate(parts[1:], start=2):
            other = part.first_row().schema
            if sorted(first.names) != sorted(other.names) or any(first.field(f.name).type != f.type for f in other):
                raise DataError(
                    f"the parts of a Mix must have the same columns: part 1 has {_shown(first)}, part {number} has "
                    f"{_shown(other)}. Select and cast them in the task's dataset()."
                )

    @property
    def num_rows(self) -> int:
        return self._num_rows

    @property
    def chunk_rows(self) -> tuple[int, ...]:
        return (self._num_rows,)

    @property
    def window_rows(self) -> int:
        return self._num_rows

    def read(self, chunks: Sequence[int]) -> Rows:
        """Refuse: rows are taken by their positions."""
        raise TypeError("a Mix has no chunks: take rows by `taker`")

    def first_row(self) -> pa.Table:
        return self._parts[0].first_row()

    def taker(
        self, *, seed: int, shuffle: bool = True, read_ahead: bool = True, ends: threading.Event | None = None
    ) -> MixedTaker:
        """Return a reader of mixed rows."""
        return MixedTaker(self._parts, self._schema, self.counts, self._num_rows, seed, shuffle, read_ahead, ends)


class MixedTaker:
    """A `Taker` of mixed rows. The index of a row counts the rows of all parts, and those of earlier passes."""

    def __init__(
        self,
        parts: Sequence[Source],
        schema: pa.Schema,
        counts: Sequence[int],
        num_rows: int,
        seed: int,
        shuffle: bool,
        read_ahead: bool,
        ends: threading.Event | None,
    ) -> None:
        """
        Args:
            parts: sources of the parts.
            schema: schema of the rows.
            counts: draws of each part in a cycle.
            num_rows: samples of an epoch.
            seed: seed of the run.
            shuffle: False: the rows of each part in their own order.
            read_ahead: same as in `WindowCache`.
            ends: same as in `WindowCache`.
        """
        self._sizes = [part.num_rows for part in parts]
        self._schema, self._counts, self._num_rows, self._seed = schema, list(counts), num_rows, seed
        self._caches = [
            WindowCache(part, seed=_seed_of(seed, index), shuffle=shuffle, read_ahead=read_ahead, ends=ends)
            for index, part in enumerate(parts)
        ]
        self._cycle: _Cycle | None = None

    def take(self, epoch: int, start: int, stop: int) -> tuple[pa.Table, Indices]:
        first, last = epoch * self._num_rows + start, epoch * self._num_rows + stop
        tables: list[pa.Table] = []
        ids: list[Indices] = []
        places: list[Indices] = []
        for number in range(first // CYCLE, (last - 1) // CYCLE + 1):
            begin, end = max(first - number * CYCLE, 0), min(last - number * CYCLE, CYCLE)
            part_of, rank_of = self._in_cycle(number)
            for part, count in enumerate(self._counts):
                at = np.flatnonzero(part_of[begin:end] == part)
                if len(at):
                    draw = number * count + int(rank_of[begin + at[0]])  # the draws of a part follow each other
                    self._take_part(part, draw, draw + len(at), tables, ids)
                    places.append(at + begin + number * CYCLE - first)
        order = np.argsort(np.concatenate(places), kind="stable")
        whole = pa.concat_tables([_in_order(plain(table), self._schema) for table in tables])
        return Rows(whole).take(order), np.concatenate(ids)[order]

    def close(self) -> None:
        for cache in self._caches:
            cache.close()
        self._cycle = None

    def _take_part(self, part: int, start: int, stop: int, tables: list[pa.Table], ids: list[Indices]) -> None:
        """Append the draws of a part from `start` to `stop`, counted from the start of the run."""
        size, all_rows = self._sizes[part], sum(self._sizes)
        while start < stop:
            number, place = divmod(start, size)
            end = min(place + stop - start, size)
            table, rows = self._caches[part].take(number, place, end)
            tables.append(table)
            ids.append(rows + sum(self._sizes[:part]) + number * all_rows)
            start += end - place

    def _in_cycle(self, number: int) -> tuple[Indices, Indices]:
        if self._cycle is None or self._cycle.number != number:
            self._cycle = _Cycle(number, self._counts, self._seed)
        return self._cycle.draws


@dataclass(frozen=True)
class _Cycle:
    """A cycle: the part of each of its samples."""

    number: int
    counts: Sequence[int]
    seed: int

    @cached_property
    def draws(self) -> tuple[Indices, Indices]:
        """The part of each sample, and the number of the draws of that part before it in the cycle."""
        parts = np.repeat(np.arange(len(self.counts)), self.counts)
        part_of = parts[random_permutation(CYCLE, self.seed, self.number, _CYCLE)]
        by_part = np.argsort(part_of, kind="stable")
        rank_of = np.empty_like(by_part)
        rank_of[by_part] = np.concatenate([np.arange(count) for count in self.counts])
        return part_of, rank_of


def counts_of(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return how often each part is drawn in a cycle: in proportion to its weight, and once at least.

    Raises:
        TaskError: the weights do not fit the parts, or one is not above 0.
    """
    if len(weights) != num_parts or not num_parts:
        raise TaskError(f"Mix has {num_parts} parts and {len(weights)} weights: give one for each part")
    if wrong := [weight for weight in weights if not 0 < weight < math.inf]:
        raise TaskError(f"a weight of a Mix must be a number above 0, got {wrong[0]!r}: leave the part out instead")
    total = math.fsum(weights)
    exact = [CYCLE * weight / total for weight in weights]
    counts = [max(1, math.floor(share)) for share in exact]
    for index in sorted(range(num_parts), key=lambda index: (counts[index] - exact[index], index)):
        counts[index] += 1 if sum(counts) < CYCLE else 0
    while sum(counts) > CYCLE:  # of parts that were raised to 1
        counts[counts.index(max(counts))] -= 1
    return counts


def _in_order(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return a table with the columns in the order and the exact types of a schema."""
    return table if table.schema.equals(schema) else table.select(schema.names).cast(schema)


def _seed_of(seed: int, part: int) -> int:
    """Return the seed of the order of one part."""
    return int(np.random.SeedSequence(seed, spawn_key=(_SOURCE, part)).generate_state(1, np.uint64)[0])


def _shown(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)
