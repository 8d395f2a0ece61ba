"""Combinations of a space's values that the rules of the base config refuse: found, shown and left out."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from orchestray.platform.config.problems import Problem, shown
from orchestray.search.config.conditions import space_conditions
from orchestray.search.config.dimensions import Integer, LogInteger, LogUniform, Uniform, edges
from orchestray.search.config.trial import changed
from orchestray.search.methods.space import Space
from orchestray.trainers.config.schema import TrainConfig

if TYPE_CHECKING:
    from orchestray.search.config.schema import SearchConfig

_MOST_TRIED = 256
_MOST_WHOLE = 4


@dataclass(frozen=True)
class Refusal:
    """A function of a point that returns True if the base config refuses its values; picklable."""

    base: TrainConfig
    samples: int | None = None
    """Samples of each trial, if its length is given in them."""

    @classmethod
    def of(cls, config: SearchConfig) -> Refusal:
        """Return the refusal of a search's trials."""
        return cls(config.base, config.search.budget.samples_per_trial)

    def __call__(self, values: Mapping[str, Any]) -> bool:
        return self.problem(values) is not None

    def problem(self, values: Mapping[str, Any]) -> Problem | None:
        """Return the first problem of a trial with these values; None if it has none."""
        made = changed(self.base, values, samples=self.samples, look_at_task=False)
        return None if isinstance(made, TrainConfig) else made[0]


@dataclass(frozen=True)
class Combinations:
    """The combinations of a space's values that were tried against the rules of the base config."""

    config: SearchConfig
    num_tried: int
    refused: tuple[Mapping[str, Any], ...]
    never: tuple[tuple[str, Any], ...]
    """Keys with values that are in refused combinations only."""
    are_all: bool
    """True if there are no other combinations, but for numbers between those that were tried."""

    @property
    def refusal(self) -> Refusal | None:
        """Check of a point before it is proposed; None: none can be refused."""
        return Refusal.of(self.config) if self.refused or not self.are_all else None

    @property
    def is_every_one_refused(self) -> bool:
        """True if there is nothing to search."""
        return self.are_all and len(self.refused) == self.num_tried > 0

    @property
    def caution(self) -> str | None:
        """Sentence on combinations that are refused, with a remedy; None if there are none."""
        if not self.refused:
            return None
        refusal, values = Refusal.of(self.config), dict(self.refused[0])
        for key in list(values):  # what is left is refused by itself
            without = {other: value for other, value in values.items() if other != key}
            if refusal(without):
                values = without
        problem = refusal.problem(values)
        assert problem is not None
        listed = ", ".join(f"{key}: {shown(value)}" for key, value in values.items())
        some = "combinations" if self.are_all else "combinations that were tried"
        never = ", ".join(f"{key}: {shown(value)}" for key, value in self.never)
        lost = f"; never tried: {never}" if never and self.are_all else ""
        return (
            f"the base config's rules refuse {len(self.refused)} of {self.num_tried} {some}, which are left out: "
            f"{listed} ({problem.path}: {problem.text}){lost}. {self._remedy(refusal, values, problem.path)}"
        )

    def _remedy(self, refusal: Refusal, values: Mapping[str, Any], path: str) -> str:
        """Return advice on values that are refused: those of one key under which another exists."""
        space = self.config.search.space
        keys = sorted(values, key=lambda key: (key == path, not key.endswith(".type"), key.count(".")))
        key = keys[-1]
        for other in keys[:-1] if len(keys) > 1 else [other for other in self.refused[0] if other != key]:
            rest = {name: value for name, value in values.items() if name != other}
            good = [value for value in tried_values(space[other]) if not refusal({other: value, **rest})]
            if good and not isinstance(space[other], Uniform | LogUniform):
                listed = ", ".join(map(shown, good))
                return f"Say when the key exists: search.space.{key}: {{..., when: {{{other}: [{listed}]}}}}"
        return "Say when a key exists (when: {OTHER: [VALUES]}), or choose among whole sections"


def combinations_of(config: SearchConfig) -> Combinations:
    """Try the combinations of a space: of each range both ends, of others each value; if too many, some by chance."""
    return _tried(_Remembered(config))


class _Remembered:
    """A config that is equal to others with the same base, space and length of trials."""

    def __init__(self, config: SearchConfig) -> None:
        self.config = config
        self._key = (config.base.model_dump_json(), repr(config.search.space), config.search.budget.samples_per_trial)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Remembered) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@lru_cache(maxsize=4)
def _tried(remembered: _Remembered) -> Combinations:
    config = remembered.config
    dimensions, refusal = config.search.space, Refusal.of(config)
    axes = {key: tried_values(dimension) for key, dimension in dimensions.items()}
    nothing: Any = dict.fromkeys(dimensions)
    space = Space(nothing, space_conditions(config.base, dimensions))
    points = list(islice(space.points(axes), _MOST_TRIED + 1)) if dimensions else []
    are_all = len(points) <= _MOST_TRIED
    if not are_all:
        draws = random.Random(0)
        points = [space.active({key: draws.choice(axis) for key, axis in axes.items()}) for _ in range(_MOST_TRIED)]
    refused = tuple(point for point in points if refusal(point))
    trained = [point for point in points if point not in refused]
    values = [(key, value) for key, axis in axes.items() for value in axis]
    never = tuple(one for one in values if not any(one[0] in point and point[one[0]] == one[1] for point in trained))
    return Combinations(config, len(points), refused, never, are_all)


def tried_values(dimension: Any) -> tuple[Any, ...]:
    """Return the values of a dimension that are tried in combinations: both ends of a range, each of a few others."""
    if isinstance(dimension, Integer | LogInteger) and dimension.high - dimension.low < _MOST_WHOLE:
        return tuple(range(dimension.low, dimension.high + 1))
    return edges(dimension)
