"""The `search.space` section: the values a key of the base config may take."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from orchestray.platform.config.base import Number, Section, Whole
from orchestray.platform.config.problems import shown
from orchestray.search.methods.conditions import is_among

When = dict[str, Any]


class Uniform(Section):
    """A real number, evenly from `low` to `high`."""

    type: Literal["uniform"]
    """The type `uniform`."""
    low: Number
    """The least."""
    high: Number
    """The greatest."""
    when: When = Field(default_factory=dict)
    """Other keys with the value, or a list of values, under which this one exists; all must hold."""


class LogUniform(Section):
    """A real number, evenly in its logarithm: learning rates and the like."""

    type: Literal["log_uniform"]
    """The type `log_uniform`."""
    low: Number
    """The least; above 0."""
    high: Number
    """The greatest."""
    when: When = Field(default_factory=dict)
    """Other keys with the value, or a list of values, under which this one exists; all must hold."""


class Integer(Section):
    """A whole number from `low` to `high`, both included."""

    type: Literal["integer"]
    """The type `integer`."""
    low: Whole
    """The least."""
    high: Whole
    """The greatest."""
    when: When = Field(default_factory=dict)
    """Other keys with the value, or a list of values, under which this one exists; all must hold."""


class LogInteger(Section):
    """A whole number, evenly in its logarithm: widths and the like."""

    type: Literal["log_integer"]
    """The type `log_integer`."""
    low: Whole
    """The least; above 0."""
    high: Whole
    """The greatest."""
    when: When = Field(default_factory=dict)
    """Other keys with the value, or a list of values, under which this one exists; all must hold."""


class Choice(Section):
    """One of some values."""

    type: Literal["choice"]
    """The type `choice`."""
    values: Annotated[tuple[Any, ...], Field(min_length=1)]
    """Possible values: numbers, texts, lists, whole sections. Numbers in rising order have neighbours."""
    when: When = Field(default_factory=dict)
    """Other keys with the value, or a list of values, under which this one exists; all must hold."""


class Binary(Section):
    """False or true."""

    type: Literal["binary"]
    """The type `binary`."""
    when: When = Field(default_factory=dict)
    """Other keys with the value, or a list of values, under which this one exists; all must hold."""


Dimension = Annotated[Uniform | LogUniform | Integer | LogInteger | Choice | Binary, Field(discriminator="type")]
Range = Uniform | LogUniform | Integer | LogInteger


def edges(dimension: Any) -> tuple[Any, ...]:
    """Return the values that are checked for a whole dimension: both ends of a range, every choice."""
    if isinstance(dimension, Choice):
        return dimension.values
    return (False, True) if isinstance(dimension, Binary) else (dimension.low, dimension.high)


def own_value(dimension: Any, value: Any) -> Any:
    """Return a value inside a dimension as the dimension has it: 1 as 1.0 in a range of numbers, or of a choice."""
    if isinstance(dimension, Choice):
        return next(one for one in dimension.values if is_among(value, (one,)))
    return float(value) if isinstance(dimension, Uniform | LogUniform) else value


def why_outside(dimension: Any, value: Any) -> str | None:
    """Return why a value is outside a dimension, as a sentence; None if it is inside."""
    if isinstance(dimension, Choice):
        known = ", ".join(map(shown, dimension.values))
        return None if is_among(value, dimension.values) else f"must be one of {known}, got {shown(value)}"
    if isinstance(dimension, Binary):
        return None if isinstance(value, bool) else f"must be false or true, got {shown(value)}"
    is_whole = isinstance(dimension, Integer | LogInteger)
    kind, taken = ("a whole number", int) if is_whole else ("a number", int | float)
    if isinstance(value, bool) or not isinstance(value, taken) or not dimension.low <= value <= dimension.high:
        return f"must be {kind} from {dimension.low:g} to {dimension.high:g}, got {shown(value)}"
    return None
