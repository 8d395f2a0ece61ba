"""The `search.space` section: the values a key of the base config may take."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from orchestray.platform.config.base import Number, Section, Whole


class Uniform(Section):
    """A real number, evenly from `low` to `high`."""

    type: Literal["uniform"]
    """The type `uniform`."""
    low: Number
    """The least."""
    high: Number
    """The greatest."""


class LogUniform(Section):
    """A real number, evenly in its logarithm: learning rates and the like."""

    type: Literal["log_uniform"]
    """The type `log_uniform`."""
    low: Number
    """The least; above 0."""
    high: Number
    """The greatest."""


class Integer(Section):
    """A whole number from `low` to `high`, both included."""

    type: Literal["integer"]
    """The type `integer`."""
    low: Whole
    """The least."""
    high: Whole
    """The greatest."""


class LogInteger(Section):
    """A whole number, evenly in its logarithm: widths and the like."""

    type: Literal["log_integer"]
    """The type `log_integer`."""
    low: Whole
    """The least; above 0."""
    high: Whole
    """The greatest."""


class Choice(Section):
    """One of some values."""

    type: Literal["choice"]
    """The type `choice`."""
    values: Annotated[tuple[Any, ...], Field(min_length=1)]
    """What there is to choose from: numbers, texts, lists, whole sections. Numbers in rising order have neighbours."""


class Binary(Section):
    """False or true."""

    type: Literal["binary"]
    """The type `binary`."""


Dimension = Annotated[Uniform | LogUniform | Integer | LogInteger | Choice | Binary, Field(discriminator="type")]
Range = Uniform | LogUniform | Integer | LogInteger


def edges(dimension: Any) -> tuple[Any, ...]:
    """The values that have to be right for all of a dimension to be: both ends of a range, every choice."""
    if isinstance(dimension, Choice):
        return dimension.values
    return (False, True) if isinstance(dimension, Binary) else (dimension.low, dimension.high)
