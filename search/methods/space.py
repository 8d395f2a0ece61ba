"""A space of hyper-parameters: dimensions by key, the keys that a point has, and the points that a search skips."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

from orchestray.search.methods.conditions import Conditions

if TYPE_CHECKING:
    import numpy as np

    from orchestray.search.spaces.dimensions import Dimension

MAX_DRAWS = 200
"""Number of draws without a new point after which a space counts as exhausted."""
_MAX_COUNTED = 100_000
_MAX_REMEMBERED = 100_000

Values = Mapping[str, Any]


class Space(Mapping[str, "Dimension"]):
    """Dimensions by dotted key. A point has a value for each key whose conditions hold."""

    def __init__(
        self,
        dimensions: Mapping[str, Dimension],
        conditions: Conditions | None = None,
        is_refused: Callable[[Values], bool] | None = None,
    ) -> None:
        """
        Args:
            dimensions: dimension of each key.
            conditions: conditions of keys; None: every point has all keys.
            is_refused: returns True for points that no trial can have, a pure function; None: there are none.

        Raises:
            ValueError: keys depend on each other in a circle.
        """
        self._dimensions = dict(dimensions)
        self.conditions = Conditions() if conditions is None else conditions
        self._is_refused = is_refused
        self._known: dict[str, bool] = {}
        """True for recent points that are refused."""
        self.order = self.conditions.order(self._dimensions)
        """Keys, each after those that it depends on."""

    @classmethod
    def of(cls, dimensions: Mapping[str, Dimension]) -> Space:
        """Return a space of dimensions; a space itself unchanged."""
        return dimensions if isinstance(dimensions, Space) else cls(dimensions)

    def __getitem__(self, key: str) -> Dimension:
        return self._dimensions[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._dimensions)

    def __len__(self) -> int:
        return len(self._dimensions)

    @property
    def is_conditional(self) -> bool:
        """True if some points lack keys."""
        return bool(self.conditions)

    def active(self, values: Values) -> dict[str, Any]:
        """Return the values without those of keys that the point does not have, in the order of the space."""
        if not self.conditions:
            return dict(values)
        made = self.conditions.active(values)
        return {key: made[key] for key in self if key in made}

    def completed(self, values: Values, rng: np.random.Generator) -> dict[str, Any]:
        """Return the values after a change: without those of keys that are gone, with drawn ones for new keys."""
        if not self.conditions and len(values) == len(self):
            return dict(values)
        made = dict(values)
        for key in self.order:
            if not self.conditions.is_active(key, made):
                made.pop(key, None)
            elif key not in made:
                made[key] = self[key].sample(rng)
        return {key: made[key] for key in self if key in made}

    def begun(self, given: Values, proposed: Values, rng: np.random.Generator) -> dict[str, Any]:
        """Return a point with given values that a trial can have; after 200 draws without one, any with them.

        Args:
            given: values of some keys.
            proposed: values of the other keys, as far as the point has them; those of a refused point are drawn.
            rng: random numbers of this point.
        """
        for _ in range(MAX_DRAWS):
            made = self.completed({**proposed, **given}, rng)
            if self.is_allowed(made):
                break
            proposed = self.sample(rng)
        return made

    def is_allowed(self, values: Values) -> bool:
        """Return True if a trial can have this point."""
        if self._is_refused is None:
            return True
        key = json.dumps(values, sort_keys=True, default=str)
        if key not in self._known:
            if len(self._known) == _MAX_REMEMBERED:
                self._known.clear()
            self._known[key] = self._is_refused(values)
        return not self._known[key]

    def sample(self, rng: np.random.Generator) -> dict[str, Any]:
        """Draw a point that a trial can have; after 200 draws without one, any."""
        for _ in range(MAX_DRAWS):
            values = self.active({key: dimension.sample(rng) for key, dimension in self.items()})
            if self.is_allowed(values):
                break
        return values

    def from_units(self, units: Iterable[float]) -> dict[str, Any]:
        """Return the point at a place of the unit cube, whose axes are the keys in order."""
        pairs = zip(self.items(), units, strict=True)
        return self.active({key: dimension.from_unit(float(unit)) for (key, dimension), unit in pairs})

    def points(self, axes: Mapping[str, Sequence[Any]] | None = None) -> Iterator[dict[str, Any]]:
        """Yield every point once, allowed or not, the last key varying fastest.

        Args:
            axes: values of each key; None: all, which must be countable.
        """
        every = {key: dimension.all_values() or () for key, dimension in self.items()} if axes is None else axes
        yield from self._walk(every, 0, {})

    def _walk(self, axes: Mapping[str, Sequence[Any]], depth: int, made: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if depth == len(self.order):
            yield {key: made[key] for key in self if key in made}
            return
        key = self.order[depth]
        if not self.conditions.is_active(key, made):
            yield from self._walk(axes, depth + 1, made)
            return
        for value in axes[key]:
            made[key] = value
            yield from self._walk(axes, depth + 1, made)
        made.pop(key, None)

    @cached_property
    def num_points(self) -> int | None:
        """Number of points; None if they cannot be counted, or some are refused."""
        counts = [dimension.num_values for dimension in self.values()]
        if self._is_refused is not None or any(count is None for count in counts):
            return None
        if not self.conditions:
            return math.prod(count for count in counts if count is not None)
        counted = sum(1 for _ in islice(self.points(), _MAX_COUNTED + 1))
        return counted if counted <= _MAX_COUNTED else None

    @property
    def is_finite(self) -> bool:
        """True if all points can be listed."""
        return all(dimension.num_values is not None for dimension in self.values())
