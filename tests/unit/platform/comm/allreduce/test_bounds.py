"""The strengthened bound: what the busiest rank sends at least, if no addition is done twice."""

from __future__ import annotations

import pytest

from orchestray.platform.comm.allreduce.bounds import (
    bandwidth_bound_s,
    latency_bound_s,
    no_redundancy_bound_s,
    no_redundancy_bytes,
)
from orchestray.platform.comm.allreduce.costs import AlphaBeta
from orchestray.platform.comm.allreduce.schedules import ALGORITHMS, schedule, sent_elements

MODEL = AlphaBeta(alpha_s=50e-6, beta_s_per_byte=1e-9)
REPEATING = "butterfly"


def num_additions(algorithm: str, size: int, num_elements: int) -> int:
    """Return the additions of two elements that all ranks together do."""
    return sum(
        step.receive.num_elements
        for rank in range(size)
        for step in schedule(algorithm, rank, size, num_elements)
        if step.receive is not None and step.combine == "add"
    )


@pytest.mark.parametrize("size", range(2, 18))
def test_all_but_the_butterfly_repeat_no_addition_and_their_busiest_rank_sends_no_less_than_the_bound(
    size: int,
) -> None:
    num_elements = 5 * size
    fewest = (size - 1) * num_elements
    for algorithm in (*ALGORITHMS, "star"):
        additions = num_additions(algorithm, size, num_elements)
        assert additions > fewest if algorithm == REPEATING else additions == fewest
        if algorithm != REPEATING:
            assert max(sent_elements(algorithm, size, num_elements)) >= no_redundancy_bytes(size, num_elements)


@pytest.mark.parametrize("size", [2, 4, 8, 16, 64])
def test_rabenseifner_sends_the_bytes_of_the_bound_at_each_rank_and_none_to_spare(size: int) -> None:
    num_elements = 3 * size
    assert sent_elements("rabenseifner", size, num_elements) == [no_redundancy_bytes(size, num_elements)] * size


def test_the_strengthened_bound_is_above_both_others_and_is_their_sum_for_two_ranks() -> None:
    for size in (2, 3, 4, 16, 1000):
        plain = latency_bound_s(size, MODEL), bandwidth_bound_s(size, 1e6, MODEL)
        assert no_redundancy_bound_s(size, 1e6, MODEL) >= sum(plain) * (1 - 1e-12)
    assert no_redundancy_bound_s(2, 1e6, MODEL) == pytest.approx(50e-6 + 1e-3)
    assert no_redundancy_bound_s(4, 1e6, MODEL) == pytest.approx(100e-6 + 1.5e-3)
