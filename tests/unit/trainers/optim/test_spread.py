"""Work spread over replicas by its cost."""

from __future__ import annotations

import itertools
import random

from orchestray.trainers.optim.spread import holders, spread


def most_loaded(workers: list[int], costs: list[int], num_workers: int) -> int:
    return max(
        sum(cost for cost, own in zip(costs, workers, strict=True) if own == worker) for worker in range(num_workers)
    )


def test_the_most_loaded_worker_has_at_most_4_3_of_the_least_that_is_possible() -> None:
    draw = random.Random(0)
    for _ in range(20):
        costs = [draw.randint(1, 50) ** 3 for _ in range(7)]
        least = min(most_loaded(list(workers), costs, 3) for workers in itertools.product(range(3), repeat=7))
        assert most_loaded(spread(costs, 3), costs, 3) <= (4 / 3 - 1 / 9) * least


def test_equal_costs_are_spread_evenly_and_alike_for_every_caller() -> None:
    assert spread([5.0] * 6, 3) == [0, 1, 2, 0, 1, 2]
    assert spread([1.0, 8.0, 2.0], 2) == [1, 0, 1]


def test_a_result_is_held_by_its_owner_first_and_by_that_fraction_of_the_workers() -> None:
    assert holders(2, 1.0, 4) == [2, 3, 0, 1]
    assert holders(2, 0.5, 4) == [2, 3]
    assert holders(3, 0.0, 4) == [3]
    assert holders(3, 0.75, 4, first=2) == [3, 2, 0]
