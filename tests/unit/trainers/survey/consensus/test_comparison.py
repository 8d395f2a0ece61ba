"""A cluster with as many servers down as may be, and with one more."""

from __future__ import annotations

import pytest

from orchestray.trainers.survey.consensus.comparison import compare, lose_most, served_again
from orchestray.trainers.survey.consensus.shards import LEASE_S


@pytest.mark.parametrize("num_servers", [3, 5, 7])
def test_decisions_go_on_with_a_minority_down_and_end_with_a_majority_down_and_none_is_wrong(num_servers: int) -> None:
    for seed in range(20):
        found = lose_most(num_servers, seed)
        assert found.minority_down >= 3  # each shard's server has been decided once more
        assert found.majority_down == 0
        assert found.violations == ()


@pytest.mark.parametrize("num_servers", [3, 5, 7])
def test_the_shards_of_a_lost_server_are_served_again_once_its_grants_have_ended(num_servers: int) -> None:
    assert all(served_again(num_servers, seed) < 3 * LEASE_S for seed in range(20))


def test_sums_are_those_of_all_schedules() -> None:
    found = compare(3, 4)
    assert (found.schedules, found.violations, found.majority_down) == (4, 0, 0)
    assert found.minority_down >= 4 * found.least_minority_down > 0
    assert found.decisions > found.schedules
    assert 6.0 <= found.messages < 9.0
