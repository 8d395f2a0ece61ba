"""Dimensions of a space of hyper-parameters: the values a config key may take, and their mapping to [0, 1]."""

from __future__ import annotations

import json
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from orchestray.platform.config.problems import shown
from orchestray.platform.errors import ConfigError

_LARGEST = sys.float_info.max
_NEAR_ZERO = 1e-4
"""Part of the range of a real number below which a number counts as 0: factors would leave it there for ever."""


class Dimension(ABC):
    """The set of values that one key may take."""

    @abstractmethod
    def from_unit(self, unit: float) -> Any:
        """Return the value at a position in [0, 1]."""

    @abstractmethod
    def to_unit(self, value: Any) -> float:
        """Return a position in [0, 1] that maps to the value (or to the nearest, if the value is outside the
        dimension).
        """

    @property
    @abstractmethod
    def num_values(self) -> int | None:
        """Number of values; None if they cannot be counted."""

    def all_values(self) -> Sequence[Any] | None:
        """Return every value once, in order; None if they cannot be counted."""
        return None

    def sample(self, rng: np.random.Generator) -> Any:
        """Draw a value."""
        return self.from_unit(float(rng.random()))

    @abstractmethod
    def perturb(self, value: Any, rng: np.random.Generator, factors: Sequence[float] = (0.8, 1.2)) -> Any:
        """Return a nearby value (Jaderberg et al., 2017, section 4.1).

        A number is multiplied by one of the factors. At 0 and at an edge of its range that would leave it as it is;
        there it moves inwards, by that factor or by the same part of the range. An ordered choice moves to a
        neighbouring value, or stays at the end. Values without an order are drawn again, all with the same probability.
        """

    @property
    def is_ordered(self) -> bool:
        """True if nearby values have similar effects."""
        return True


@dataclass(frozen=True)
class Uniform(Dimension):
    """Real numbers from `low` to `high`, uniform or, with `is_log`, uniform in their logarithm."""

    low: float
    high: float
    is_log: bool = False

    def from_unit(self, unit: float) -> float:
        if self.is_log:
            low, high = math.log(self.low), math.log(self.high)
            return min(max(math.exp(low + (high - low) * unit), self.low), self.high)
        return min(max(self.low + (self.high - self.low) * unit, self.low), self.high)

    def to_unit(self, value: Any) -> float:
        number = min(max(float(value), self.low), self.high)
        if self.is_log:
            return math.log(number / self.low) / math.log(self.high / self.low)
        return (number - self.low) / (self.high - self.low)

    @property
    def num_values(self) -> int | None:
        return None

    def perturb(self, value: Any, rng: np.random.Generator, factors: Sequence[float] = (0.8, 1.2)) -> float:
        number, factor = float(value), float(rng.choice(list(factors)))
        if not self.is_log and abs(number) < _NEAR_ZERO * (self.high - self.low):
            return self._inwards(number, factor)
        moved = self._inside(number * factor)
        return self._inwards(number, factor) if moved == number else moved

    def _inwards(self, number: float, factor: float) -> float:
        """Return a number that is moved by a part of the range (of the number itself, if log), away from an edge."""
        if self.is_log:
            return self._inside(number / factor)
        step = (factor - 1) * (self.high - self.low)
        return self._inside(number + step if self._inside(number + step) != number else number - step)

    def _inside(self, number: float) -> float:
        return min(max(number, self.low), self.high)


@dataclass(frozen=True)
class Integer(Dimension):
    """Integers from `low` to `high`, both included; with `is_log`, uniform in their logarithm."""

    low: int
    high: int
    is_log: bool = False

    def _edges(self) -> tuple[float, float]:
        low, high = self.low - 0.5, self.high + 0.5
        return (math.log(low), math.log(high)) if self.is_log else (low, high)

    def from_unit(self, unit: float) -> int:
        low, high = self._edges()
        place = low + (high - low) * unit
        number = math.exp(place) if self.is_log else place
        return min(max(math.floor(number + 0.5), self.low), self.high)

    def to_unit(self, value: Any) -> float:
        low, high = self._edges()
        number = min(max(int(value), self.low), self.high)
        return ((math.log(number) if self.is_log else number) - low) / (high - low)

    @property
    def num_values(self) -> int | None:
        return self.high - self.low + 1

    def all_values(self) -> range:
        return range(self.low, self.high + 1)  # a seed has billions

    def perturb(self, value: Any, rng: np.random.Generator, factors: Sequence[float] = (0.8, 1.2)) -> int:
        number, factor = int(value), float(rng.choice(list(factors)))
        if factor == 1:
            return number
        step = round(number * factor) - number
        if number == 0 and not self.is_log:
            step = round((factor - 1) * (self.high - self.low))
        step = step or (1 if factor > 1 else -1)  # small numbers would never move
        moved = min(max(number + step, self.low), self.high)
        return moved if moved != number else min(max(number - step, self.low), self.high)


@dataclass(frozen=True)
class Choice(Dimension):
    """A choice from a list of JSON values, which need not be ordered."""

    values: tuple[Any, ...]

    def from_unit(self, unit: float) -> Any:
        return self.values[min(int(unit * len(self.values)), len(self.values) - 1)]

    def to_unit(self, value: Any) -> float:
        return (self._places[json.dumps(value)] + 0.5) / len(self.values)

    @cached_property
    def _places(self) -> dict[str, int]:
        """First place of each value by its text: to Python 1, 1.0 and true are equal."""
        places: dict[str, int] = {}
        for place, value in enumerate(self.values):
            places.setdefault(json.dumps(value), place)
        return places

    @property
    def num_values(self) -> int | None:
        return len(self.all_values())

    def all_values(self) -> list[Any]:
        return list({repr(value): value for value in self.values}.values())

    def perturb(self, value: Any, rng: np.random.Generator, factors: Sequence[float] = (0.8, 1.2)) -> Any:
        if not self.is_ordered:
            return self.sample(rng)
        step = 1 if float(rng.choice(list(factors))) > 1 else -1
        return self.values[min(max(self._places[json.dumps(value)] + step, 0), len(self.values) - 1)]

    @property
    def is_ordered(self) -> bool:
        numbers = [value for value in self.values if isinstance(value, int | float) and not isinstance(value, bool)]
        return len(numbers) == len(self.values) and sorted(numbers) == numbers


@dataclass(frozen=True)
class Binary(Dimension):
    """A choice between False and True."""

    def from_unit(self, unit: float) -> bool:
        return bool(unit >= 0.5)

    def to_unit(self, value: Any) -> float:
        return 0.75 if value else 0.25

    @property
    def num_values(self) -> int | None:
        return 2

    def all_values(self) -> list[bool]:
        return [False, True]

    def perturb(self, value: Any, rng: np.random.Generator, factors: Sequence[float] = (0.8, 1.2)) -> bool:
        return bool(self.sample(rng))

    @property
    def is_ordered(self) -> bool:
        return False


_TYPES = ("uniform", "log_uniform", "integer", "log_integer", "choice", "binary")


def make_dimension(type: str, **arguments: Any) -> Dimension:  # noqa: A002 - the config's own word
    """Make a dimension from its section in a config.

    Args:
        type: `uniform`, `log_uniform`, `integer`, `log_integer`, `choice` or `binary`.
        arguments: `values` of a choice, JSON values or numpy's; `low` and `high` of a range, numbers.

    Raises:
        ConfigError: there is no such type, it has other arguments, or its values cannot be searched.
    """
    if type not in _TYPES:
        raise ConfigError(f"there is no dimension {type!r}; there are {', '.join(_TYPES)}")
    wanted = {"choice": ("values",), "binary": ()}.get(type, ("low", "high"))
    if {*wanted} != arguments.keys():
        raise ConfigError(
            f"{type}: takes {' and '.join(wanted) or 'no arguments'}, got {', '.join(arguments) or 'none'}"
        )
    if type == "binary":
        return Binary()
    plain = {name: plain_value(value, f"{type}.{name}") for name, value in arguments.items()}
    if type == "choice":
        if not isinstance(plain["values"], list | tuple) or not plain["values"]:
            raise ConfigError(f"choice.values: must be a list of one value or more, got {plain['values']!r}")
        return Choice(tuple(plain["values"]))
    return _range(type, plain["low"], plain["high"])


def _range(type: str, low: Any, high: Any) -> Dimension:  # noqa: A002
    """Return a range of numbers, whose ends are checked."""
    is_whole, is_log = type.endswith("integer"), type.startswith("log_")
    for name, value in (("low", low), ("high", high)):
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST
        if not is_number or (is_whole and value != int(value)):
            kind = "a whole number" if is_whole else "a finite number"
            raise ConfigError(f"{type}.{name}: must be {kind} of at most {_LARGEST:.1g}, got {shown(value)}")
    if is_log and low <= 0:
        raise ConfigError(f"{type}.low: must be > 0, got {low:g}: {type} is even in the logarithm")
    if low >= high:
        raise ConfigError(f"{type}.low: must be less than high ({high:g}), got {low:g}; for one value take a choice")
    low, high = (int(low), int(high)) if is_whole else (float(low), float(high))
    if not math.isfinite(high / low if is_log else float(high) - low):  # places between the ends would be NaN
        raise ConfigError(
            f"{type}: from {low:g} to {high:g} is wider than floating-point numbers count, up to {_LARGEST:.1g}: take "
            "ends that are nearer"
        )
    return Integer(low, high, is_log) if is_whole else Uniform(low, high, is_log)


def plain_value(value: Any, place: str) -> Any:
    """Return a value as JSON has it, numpy's as Python's, and tuples as they are.

    Args:
        value: JSON values, numpy's, tuples and ranges, nested.
        place: its name in errors.

    Raises:
        ConfigError: something in it has no such form; proposals are kept in files.
    """
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        made = [plain_value(each, f"{place}[{index}]") for index, each in enumerate(value)]
        return tuple(made) if isinstance(value, tuple) else made
    if isinstance(value, range):
        return [*value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: plain_value(each, f"{place}.{key}") for key, each in value.items()}
    if value is None or isinstance(value, str | int | float):
        return value
    raise ConfigError(
        f"{place}: must be numbers, texts, lists or mappings of those, got {value!r}; for an object take its name, "
        "and look it up where you train"
    )


def sample(space: Mapping[str, Dimension], rng: np.random.Generator) -> dict[str, Any]:
    """Draw a value for each key."""
    return {key: dimension.sample(rng) for key, dimension in space.items()}


def from_units(space: Mapping[str, Dimension], units: Sequence[float]) -> dict[str, Any]:
    """Return the values at a point of the unit cube, whose axes are the keys in order."""
    return {key: dimension.from_unit(float(unit)) for (key, dimension), unit in zip(space.items(), units, strict=True)}
