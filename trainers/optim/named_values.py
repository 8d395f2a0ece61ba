"""Rates and penalties of parameters by patterns of their names, for an optimizer that moves all parameters together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple


class NamedValues(NamedTuple):
    """The values of the parameters whose names a pattern has."""

    pattern: str
    """Pattern of the names, as in file names: `*` stands for any text."""
    rate: float
    """Learning rate relative to that of the run."""
    weight_decay: float
    """L2 penalty added to the gradient."""

    @classmethod
    def of_groups(cls, groups: Sequence[Mapping[str, Any]], weight_decay: float) -> list[NamedValues]:
        """Return the values of each group, and last those of all other parameters.

        Args:
            groups: `match` of each group, with `rate` and `weight_decay` where they differ.
            weight_decay: penalty of the parameters without one of their own.
        """
        named = [cls(g["match"], float(g.get("rate", 1.0)), float(g.get("weight_decay", weight_decay))) for g in groups]
        return [*named, cls("*", 1.0, weight_decay)]


def first_match(values: Sequence[NamedValues], name: str) -> NamedValues:
    """Return the first values whose pattern the name has; the last pattern has to match all names."""
    return next(each for each in values if fnmatchcase(name, each.pattern))
