"""A chain and a tree join all values with the same number of operations, at different depths."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from orchestray.trainers.survey.operators.reductions import chain, tree


@dataclass(frozen=True)
class Counted:
    """A number, with the operations that it took, and those of them on the longest way to it."""

    value: Any
    operations: int = 0
    depth: int = 0

    def __add__(self, other: Counted) -> Counted:
        return Counted(
            self.value + other.value, self.operations + other.operations + 1, max(self.depth, other.depth) + 1
        )


def added(left: Counted, right: Counted) -> Counted:
    return left + right


@pytest.mark.parametrize(
    ("reduce", "depth"), [(chain, lambda n: n - 1), (tree, lambda n: math.ceil(math.log2(n)))], ids=["chain", "tree"]
)
def test_any_number_of_values_takes_n_minus_1_operations_in_n_minus_1_levels_of_a_chain_and_log2_n_of_a_tree(
    reduce: Callable[..., Counted], depth: Callable[[int], int]
) -> None:
    numbers = [7**k % 1_000_003 for k in range(1000)]
    for count in range(1, 1001):
        found = reduce([Counted(number) for number in numbers[:count]], added)
        assert found == Counted(sum(numbers[:count]), count - 1, depth(count))


@pytest.mark.parametrize("reduce", [chain, tree])
def test_the_order_of_the_values_is_kept(reduce: Callable[..., Counted]) -> None:
    for count in range(1, 40):
        letters = [chr(97 + number % 26) for number in range(count)]
        assert reduce([Counted(letter) for letter in letters], added).value == "".join(letters)
