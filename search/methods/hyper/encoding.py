"""Points of a search as arrays, for models that compare them: numbers in [0, 1], choices and genomes as codes.

A genome, whatever its space, is compared by its scalars: each place in its JSON value is a column, and two genomes
differ by the number of columns in which they have different scalars, or one of them none. For a space of choices
these are just the choices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchestray.search.spaces.base import Genome
from orchestray.search.spaces.dimensions import Choice, Dimension

_MAX_SNAPPED = 4096
"""Integers of a wider range are modelled as real numbers."""
ABSENT = -1
"""The code of a column in which a genome has no scalar."""
_CODE_BITS = 32
_SCALARS = frozenset({str, int, float, bool, type(None)})
"""Of JSON."""


@dataclass(frozen=True)
class Encoded:
    """n points."""

    units: np.ndarray
    """[n, num_units]: numbers, ordered choices and flags in [0, 1]."""
    choices: np.ndarray
    """[n, num_choices]: index of the value of each choice without an order."""
    genes: np.ndarray
    """[n, num_columns]: a code for each scalar of the genome, -1 where it has none."""

    def __len__(self) -> int:
        return len(self.units)

    def __getitem__(self, rows: Any) -> Encoded:
        return Encoded(self.units[rows], self.choices[rows], self.genes[rows])


def stack(parts: Sequence[Encoded]) -> Encoded:
    """The points of all parts, in their order; columns that some do not know are absent there."""
    width = max(part.genes.shape[1] for part in parts)
    return Encoded(
        np.concatenate([part.units for part in parts]),
        np.concatenate([part.choices for part in parts]),
        np.concatenate([widened(part.genes, width) for part in parts]),
    )


def widened(genes: np.ndarray, width: int) -> np.ndarray:
    """Genes [n, ...] with as many columns as are known now; in those that are new they have no scalar."""
    if genes.shape[1] == width:
        return genes
    return np.pad(genes, ((0, 0), (0, width - genes.shape[1])), constant_values=ABSENT)


class Encoder:
    """Turns points into arrays and back."""

    def __init__(self, space: Mapping[str, Dimension], has_genomes: bool) -> None:
        self.space, self.has_genomes = dict(space), has_genomes
        self.unordered = {key: d for key, d in space.items() if isinstance(d, Choice) and not d.is_ordered}
        self.numeric = {key: d for key, d in space.items() if key not in self.unordered}
        self._tables = [_places(dimension) for dimension in self.numeric.values()]
        self._choice_codes = [
            {repr(value): code for code, value in enumerate(dimension.all_values())}
            for dimension in self.unordered.values()
        ]
        self.num_options = [len(codes) for codes in self._choice_codes]
        self._columns: dict[str, tuple[int, dict[str, int]]] = {}
        """Of each place in a genome: its column, and the codes of the scalars met there."""
        self._met: dict[tuple[Any, type, Any], int] = {}
        """The gene of each scalar that was met as a value of a genome that is a mapping."""

    @property
    def num_groups(self) -> int:
        """Axes with a length scale of their own: each number, each choice, and the genome as a whole."""
        return len(self.numeric) + len(self.unordered) + self.has_genomes

    def typical_lengths(self) -> np.ndarray:
        """How far along each axis points are alike, before anything is known: half the range of a number, a change of
        one choice, of a few columns of a genome. [num_groups].
        """
        lengths = [0.5] * len(self.numeric) + [1.0] * len(self.unordered) + [2.0] * self.has_genomes
        return np.array(lengths)

    def encode(self, values: Mapping[str, Any], genome: Genome = None) -> Encoded:
        """One point, as [1, ...]."""
        units = [dimension.to_unit(values[key]) for key, dimension in self.numeric.items()]
        keys = zip(self.unordered, self._choice_codes, strict=True)
        choices = [codes[repr(values[key])] for key, codes in keys]
        genes = self.encode_genomes([genome] if self.has_genomes else [None])
        return Encoded(np.array([units], dtype=float), np.array([choices], dtype=np.int64), genes)

    def encode_genomes(self, genomes: Sequence[Genome]) -> np.ndarray:
        """[n, num_columns]; learns the columns and scalars that are new."""
        if not self.has_genomes:
            return np.empty((len(genomes), 0), dtype=np.int64)
        met = [self._genes(genome) for genome in genomes]
        rows = np.repeat(np.arange(len(genomes)), [len(genes) for genes in met])
        every = np.array([gene for genes in met for gene in genes], dtype=np.int64)
        coded = np.full((len(genomes), len(self._columns)), ABSENT, dtype=np.int64)
        coded[rows, every >> _CODE_BITS] = every & ((1 << _CODE_BITS) - 1)
        return coded

    def _genes(self, genome: Genome) -> list[int]:
        """A number for each scalar in a genome: its column, and in the lowest `_CODE_BITS` its code."""
        if not isinstance(genome, Mapping):
            return [self._gene(place, scalar) for place, scalar in _scalars(genome)]
        with contextlib.suppress(KeyError, TypeError):  # a scalar that is new, or no scalar
            return [self._met[key, part.__class__, part] for key, part in genome.items()]
        genes: list[int] = []
        for key, part in genome.items():
            if part.__class__ not in _SCALARS:
                genes += [self._gene(place, scalar) for place, scalar in _scalars(part, f".{key}")]
                continue
            known = (key, part.__class__, part)
            gene = self._met.get(known)
            if gene is None:
                gene = self._met[known] = self._gene(f".{key}", repr(part))
            genes.append(gene)
        return genes

    def _gene(self, place: str, scalar: str) -> int:
        column, codes = self._columns.setdefault(place, (len(self._columns), {}))
        return column << _CODE_BITS | codes.setdefault(scalar, len(codes))

    def decode(self, units: np.ndarray, choices: np.ndarray) -> dict[str, Any]:
        """The values of one point, in the order of the space."""
        values = {key: d.from_unit(float(unit)) for (key, d), unit in zip(self.numeric.items(), units, strict=True)}
        for (key, dimension), code in zip(self.unordered.items(), choices, strict=True):
            values[key] = dimension.all_values()[int(code)]
        return {key: values[key] for key in self.space}

    def snap(self, units: np.ndarray) -> np.ndarray:
        """The places in [0, 1] of the values that these places stand for: [n, num_units]."""
        snapped: np.ndarray = np.clip(units, 0.0, 1.0)
        for axis, table in enumerate(self._tables):
            if table is not None:
                middles = (table[1:] + table[:-1]) / 2
                snapped[:, axis] = table[np.searchsorted(middles, snapped[:, axis])]
        return snapped

    def distances(self, a: Encoded, b: Encoded) -> np.ndarray:
        """Squared distances along each axis: [num_groups, len(a), len(b)]; 1 for unlike choices, and for genomes the
        number of columns they differ in.
        """
        along = np.empty((self.num_groups, len(a), len(b)))
        num_units = len(self.numeric)
        along[:num_units] = (a.units.T[:, :, None] - b.units.T[:, None, :]) ** 2
        for axis in range(len(self.unordered)):
            along[num_units + axis] = a.choices[:, axis, None] != b.choices[None, :, axis]
        if self.has_genomes:
            width = max(a.genes.shape[1], b.genes.shape[1])
            along[-1] = _differences(widened(a.genes, width), widened(b.genes, width))
        return along


def _differences(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """In how many columns the rows differ: [len(a), len(b)]."""
    highest = max(a.max(initial=0), b.max(initial=0))
    small = np.int16 if highest <= np.iinfo(np.int16).max else np.int64  # comparing costs by the byte
    of_a, of_b = (np.ascontiguousarray(rows.T, small) for rows in (a, b))
    count = np.zeros((len(a), len(b)), np.int32)
    for column_a, column_b in zip(of_a, of_b, strict=True):  # never more than one column's comparison in memory
        count += column_a[:, None] != column_b
    return count.astype(float)


def _places(dimension: Dimension) -> np.ndarray | None:
    """Where the values of a dimension lie, rising; None: everywhere."""
    count = dimension.num_values
    if count is None or count > _MAX_SNAPPED:
        return None
    return np.unique([dimension.to_unit(value) for value in dimension.all_values() or ()])


def _scalars(genome: Genome, place: str = "") -> Iterator[tuple[str, str]]:
    """Every scalar in a JSON value, with its place."""
    if isinstance(genome, Mapping):
        for key, part in genome.items():
            yield from _scalars(part, f"{place}.{key}")
    elif isinstance(genome, list | tuple):
        for index, part in enumerate(genome):
            yield from _scalars(part, f"{place}[{index}]")
        yield f"{place}.length", str(len(genome))
    else:
        yield place, repr(genome)
