"""How a population that is one trial is handed to its program: JSON values, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestray.search.spaces.dimensions import Binary, Choice, Dimension, Integer, Uniform, make_dimension

PROGRAM = "orchestray.search.trials.packed:PackedPopulation"


def arguments(space: Mapping[str, Dimension], **parameters: Any) -> dict[str, Any]:
    """Of the program `PROGRAM`: the space as a config writes it, and the method's parameters."""
    return {"space": {key: written(dimension) for key, dimension in space.items()}, **parameters}


def written(dimension: Dimension) -> dict[str, Any]:
    """A dimension as a config writes it."""
    match dimension:
        case Uniform(low, high, is_log) | Integer(low, high, is_log):
            kind = "uniform" if isinstance(dimension, Uniform) else "integer"
            return {"type": f"log_{kind}" if is_log else kind, "low": low, "high": high}
        case Choice(values):
            return {"type": "choice", "values": list(values)}
        case Binary():
            return {"type": "binary"}
    raise TypeError(f"{type(dimension).__name__} is no dimension that a config can write")


def read(space: Mapping[str, Mapping[str, Any]]) -> dict[str, Dimension]:
    """The dimensions again."""
    return {key: make_dimension(**dimension) for key, dimension in space.items()}
