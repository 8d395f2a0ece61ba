"""A parameter sweep: every combination, once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Proposal
from orchestray.search.methods.hyper.proposer import Proposer
from orchestray.search.spaces.architectures.base import Genome
from orchestray.search.spaces.architectures.choices import ChoiceSpace
from orchestray.search.spaces.dimensions import Dimension

_MOST_ALIKE = 2_000


class Grid(Proposer):
    """The Cartesian product of all dimensions, the last key varying fastest; each point exactly once.

    Order-free: the proposals do not depend on scores. With an architecture, each of its networks is combined with each
    combination of the values; equal networks count once.
    """

    is_order_free = True

    def __init__(self, *, points: Mapping[str, int] | None = None, **arguments: Any) -> None:
        """Take the parameters of `params.Grid` and the arguments of `Method`.

        Points of a log dimension are even in the logarithm. If `trials` is given, only the first points are tried.

        Raises:
            ConfigError: a real number has no `points`, or the architectures cannot be enumerated.
        """
        super().__init__(**arguments)
        points = dict(points or {})
        if unknown := [key for key in points if key not in self.space]:
            raise ConfigError(f"search.method.points: {unknown[0]!r} is no key of search.space")
        self.axes = {key: _values(key, dimension, points.get(key)) for key, dimension in self.space.items()}
        if self.architecture is not None and not isinstance(self.architecture, ChoiceSpace):
            raise ConfigError(
                f"a grid needs architectures that can be enumerated (a ChoiceSpace), not a "
                f"{type(self.architecture).__name__}; use random or an evolution"
            )
        self._walk = self._points()
        self._next: tuple[dict[str, Any], Genome] | None = None
        self._look_ahead()

    def _points(self) -> Iterator[tuple[dict[str, Any], Genome]]:
        genomes: Iterator[Genome] = iter([None])
        if isinstance(self.architecture, ChoiceSpace):
            genomes = iter(self.architecture.enumerate())
        for genome in genomes:
            for values in self.space.points(self.axes):
                yield values, genome

    def _look_ahead(self) -> None:
        """Find the next point that was not proposed.

        Raises:
            ConfigError: too many points in a row are known: the space is too large for a grid.
        """
        self._next = None
        num_known = 0
        for point in self._walk:
            if self.is_new(*point):
                self._next = point
                break
            num_known += self.is_known(*point)
            if num_known > _MOST_ALIKE:
                raise ConfigError(
                    f"{_MOST_ALIKE:,} genomes in a row are networks that the grid has had: the space is too large to "
                    "be walked; use random or an evolution, or narrow search.architecture"
                )
        self.is_exhausted = self._next is None

    def ask(self) -> Proposal | None:
        if self.is_done or self._next is None:
            return None
        values, genome = self._next
        begun = self.begun(values)
        proposal = self.propose(begun if self.is_new(begun, genome) else values, genome)
        if self.is_known(values, genome):  # otherwise it was a point to begin with
            self._look_ahead()
        return proposal


def _values(key: str, dimension: Dimension, points: int | None) -> Sequence[Any]:
    """Return the values of a dimension in the grid, each once."""
    every, count = dimension.all_values(), dimension.num_values
    if every is not None and count is not None and (points is None or points >= count):
        return every
    if points is None:
        raise ConfigError(
            f"search.space.{key}: a grid needs to know how many values to take of a range of real numbers; "
            f"say search.method.points: {{{key}: N}}, or make it a choice"
        )
    if points < 1:
        raise ConfigError(f"search.method.points.{key}: must be >= 1, got {points}")
    values = [dimension.from_unit(unit) for unit in (np.linspace(0, 1, points) if points > 1 else [0.5])]
    return list({repr(value): value for value in values}.values())
