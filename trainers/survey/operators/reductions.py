"""Reductions of n values by an associative operation: in a chain, and in a tree (survey, section 2.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Value = TypeVar("Value")


def chain(values: Sequence[Value], join: Callable[[Value, Value], Value]) -> Value:
    """Return all values joined one after another: n - 1 operations, each of which needs the one before it.

    Args:
        values: one value or more.
        join: an operation; it need not be associative here.
    """
    total = values[0]
    for value in values[1:]:
        total = join(total, value)
    return total


def tree(values: Sequence[Value], join: Callable[[Value, Value], Value]) -> Value:
    """Return all values joined in pairs, and the results in pairs again: n - 1 operations in ceil(log2 n) levels.

    Args:
        values: one value or more.
        join: an associative operation; the order of the values is kept.
    """
    parts = list(values)
    while len(parts) > 1:
        pairs = [join(left, right) for left, right in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0]
