"""Points of a search as arrays, for models that compare them: numbers in [0, 1], choices and genomes as codes.

Genomes of any space are compared by their scalars: each place in the JSON value is a column. The distance between two
genomes is the number of columns whose scalars differ, or which only one of them has. For a space of choices these are
just the choices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchestray.search.methods.space import Space
from orchestray.search.spaces.architectures.base import Genome
from orchestray.search.spaces.dimensions import Choice, Dimension

_MAX_SNAPPED = 4096
"""Most values of a dimension; integers of a wider range are modelled as real numbers."""
ABSENT = -1
"""Code of a column in which a genome has no scalar."""
_CODE_BITS = 32
_INACTIVE = 0.5
"""Place in [0, 1] of a number that a point does not have."""
_SCALARS = frozenset({str, int, float, bool, type(None)})
"""Types of JSON scalars."""


@dataclass(frozen=True)
class Encoded:
    """A batch of n encoded points."""

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
    """Concatenate batches of points; missing columns are filled with `ABSENT`."""
    width = max(part.genes.shape[1] for part in parts)
    return Encoded(
        np.concatenate([part.units for part in parts]),
        np.concatenate([part.choices for part in parts]),
        np.concatenate([widened(part.genes, width) for part in parts]),
    )


def widened(genes: np.ndarray, width: int) -> np.ndarray:
    """Return genes [n, columns] padded with `ABSENT` to [n, width]."""
    if genes.shape[1] == width:
        return genes
    return np.pad(genes, ((0, 0), (0, width - genes.shape[1])), constant_values=ABSENT)


class Encoder:
    """The conversion of points to arrays and back."""

    def __init__(self, space: Mapping[str, Dimension], has_genomes: bool) -> None:
        self.space, self.has_genomes = Space.of(space), has_genomes
        self.unordered = {key: d for key, d in space.items() if isinstance(d, Choice) and not d.is_ordered}
        self.numeric = {key: d for key, d in space.items() if key not in self.unordered}
        self._tables = [_places(dimension) for dimension in self.numeric.values()]
        self.is_real = np.array([table is None for table in self._tables], dtype=bool)
        """True for each number that is modelled as a real one: [num_units]."""
        self._choice_codes = [
            {repr(value): code for code, value in enumerate(dimension.all_values())}
            for dimension in self.unordered.values()
        ]
        self.num_options = [len(codes) for codes in self._choice_codes]
        self._columns: dict[str, tuple[int, dict[str, int]]] = {}
        """Maps each place in a genome to its column and to the codes of its scalars."""
        self._met: dict[tuple[Any, type, Any], int] = {}
        """Cache of the genes of scalars in genomes that are mappings."""

    @property
    def num_groups(self) -> int:
        """Number of axes with their own length scale: each number, each choice, and the genome as a whole."""
        return len(self.numeric) + len(self.unordered) + self.has_genomes

    def typical_lengths(self) -> np.ndarray:
        """Return the prior length scale of each axis, [num_groups].

        It is half the range of a number, the change of one choice, and the change of a few columns of a genome.
        """
        lengths = [0.5] * len(self.numeric) + [1.0] * len(self.unordered) + [2.0] * self.has_genomes
        return np.array(lengths)

    def encode(self, values: Mapping[str, Any], genome: Genome = None) -> Encoded:
        """Return one point as a batch of one, [1, ...]; keys that it does not have are at a fixed place."""
        units = [d.to_unit(values[key]) if key in values else _INACTIVE for key, d in self.numeric.items()]
        keys = zip(self.unordered, self._choice_codes, strict=True)
        choices = [codes[repr(values[key])] if key in values else 0 for key, codes in keys]
        genes = self.encode_genomes([genome] if self.has_genomes else [None])
        return Encoded(np.array([units], dtype=float), np.array([choices], dtype=np.int64), genes)

    def encode_genomes(self, genomes: Sequence[Genome]) -> np.ndarray:
        """Return the codes of genomes, [n, num_columns]; new columns and scalars are added."""
        if not self.has_genomes:
            return np.empty((len(genomes), 0), dtype=np.int64)
        met = [self._genes(genome) for genome in genomes]
        rows = np.repeat(np.arange(len(genomes)), [len(genes) for genes in met])
        every = np.array([gene for genes in met for gene in genes], dtype=np.int64)
        coded = np.full((len(genomes), len(self._columns)), ABSENT, dtype=np.int64)
        coded[rows, every >> _CODE_BITS] = every & ((1 << _CODE_BITS) - 1)
        return coded

    def _genes(self, genome: Genome) -> list[int]:
        """Return an integer for each scalar in a genome: its column and, in the lowest `_CODE_BITS`, its code."""
        if not isinstance(genome, Mapping):
            return [self._gene(place, scalar) for place, scalar in _scalars(genome)]
        with contextlib.suppress(KeyError, TypeError):  # a new scalar, or not a scalar
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
        """Return the values of one point, in the order of the space, without keys that it does not have."""
        values = {key: d.from_unit(float(unit)) for (key, d), unit in zip(self.numeric.items(), units, strict=True)}
        for (key, dimension), code in zip(self.unordered.items(), choices, strict=True):
            values[key] = dimension.all_values()[int(code)]
        return self.space.active({key: values[key] for key in self.space})

    def active(self, points: Encoded) -> tuple[np.ndarray, np.ndarray]:
        """Return True for each key that a point has: [n, num_units] and [n, num_choices]."""
        if not self.space.is_conditional:
            return np.ones(points.units.shape, bool), np.ones(points.choices.shape, bool)
        rows = [self.decode(units, choices) for units, choices in zip(points.units, points.choices, strict=True)]
        masks = [
            np.array([[key in row for key in keys] for row in rows], bool) for keys in (self.numeric, self.unordered)
        ]
        return masks[0].reshape(points.units.shape), masks[1].reshape(points.choices.shape)

    def imputed(self, points: Encoded) -> Encoded:
        """Return points with a fixed place for each key that they do not have: they differ by the others only."""
        if not self.space.is_conditional:
            return points
        of_units, of_choices = self.active(points)
        units, choices = np.where(of_units, points.units, _INACTIVE), np.where(of_choices, points.choices, 0)
        return Encoded(units, choices, points.genes)

    def snap(self, units: np.ndarray) -> np.ndarray:
        """Round places in [0, 1] to the nearest places of values: [n, num_units]."""
        snapped: np.ndarray = np.clip(units, 0.0, 1.0)
        for axis, table in enumerate(self._tables):
            if table is not None:
                middles = (table[1:] + table[:-1]) / 2
                snapped[:, axis] = table[np.searchsorted(middles, snapped[:, axis])]
        return snapped

    def neighbours(self, point: Encoded) -> Encoded:
        """Return the points that differ from one in a single step of a number that is not real, or in one choice."""
        parts = [point[[]]]
        for axis, table in enumerate(self._tables):
            if table is not None:
                at = int(np.argmin(np.abs(table - point.units[0, axis])))
                steps = table[[place for place in (at - 1, at + 1) if 0 <= place < len(table)]]
                parts.append(point[[0] * len(steps)])
                parts[-1].units[:, axis] = steps
        for axis, options in enumerate(self.num_options):
            others = np.delete(np.arange(options), point.choices[0, axis])
            parts.append(point[[0] * len(others)])
            parts[-1].choices[:, axis] = others
        return stack(parts)

    def distances(self, a: Encoded, b: Encoded) -> np.ndarray:
        """Return the squared distances along each axis: [num_groups, len(a), len(b)].

        It is 1 for different choices, and the number of differing columns for genomes.
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
    """Return the number of columns in which rows differ: [len(a), len(b)]."""
    highest = max(a.max(initial=0), b.max(initial=0))
    small = np.int16 if highest <= np.iinfo(np.int16).max else np.int64  # smaller numbers compare faster
    of_a, of_b = (np.ascontiguousarray(rows.T, small) for rows in (a, b))
    count = np.zeros((len(a), len(b)), np.int32)
    for column_a, column_b in zip(of_a, of_b, strict=True):  # one column at a time, to save memory
        count += column_a[:, None] != column_b
    return count.astype(float)


def _places(dimension: Dimension) -> np.ndarray | None:
    """Return the places of a dimension's values in [0, 1], rising; None if it is modelled as a real number."""
    count = dimension.num_values
    if count is None or count > _MAX_SNAPPED:
        return None
    return np.unique([dimension.to_unit(value) for value in dimension.all_values() or ()])


def _scalars(genome: Genome, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield the place and the text of every scalar in a JSON value."""
    if isinstance(genome, Mapping):
        for key, part in genome.items():
            yield from _scalars(part, f"{place}.{key}")
    elif isinstance(genome, list | tuple):
        for index, part in enumerate(genome):
            yield from _scalars(part, f"{place}[{index}]")
        yield f"{place}.length", str(len(genome))
    else:
        yield place, repr(genome)
