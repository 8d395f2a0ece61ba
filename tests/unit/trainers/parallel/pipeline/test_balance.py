"""Cuts are optimal, keep the memory limit, and say what is wrong where there is none."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestray.platform.errors import ConfigError
from orchestray.trainers.parallel.pipeline.balance import balanced, by_names

NAMES = ["stem", "blocks.0.first", "blocks.0.second", "blocks.1", "relu", "relu@2", "head"]


def all_cuts(num_layers: int, num_stages: int) -> list[list[tuple[int, int]]]:
    chosen = itertools.combinations(range(1, num_layers), num_stages - 1)
    return [list(itertools.pairwise([0, *cuts, num_layers])) for cuts in chosen]


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(1, 5), st.data())
def test_no_cut_has_a_smaller_largest_stage_or_is_more_even(
    costs: list[int], num_stages: int, data: st.DataObject
) -> None:
    num_stages = min(num_stages, len(costs))
    memory = data.draw(st.lists(st.integers(0, 9), min_size=len(costs), max_size=len(costs)))
    limit = data.draw(st.none() | st.integers(0, 40))

    def quality(bounds: list[tuple[int, int]]) -> tuple[int, int]:
        sums = [sum(costs[start:stop]) for start, stop in bounds]
        return max(sums), sum(value * value for value in sums)

    cuts = all_cuts(len(costs), num_stages)
    fitting = [cut for cut in cuts if limit is None or all(sum(memory[a:b]) <= limit for a, b in cut)]
    if not fitting:
        with pytest.raises(ConfigError, match="No cut into"):
            balanced(costs, num_stages, memory, limit)
        return
    found = balanced(costs, num_stages, memory, limit)
    assert found in fitting
    assert quality(found) == min(quality(cut) for cut in fitting)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e3), min_size=2, max_size=8), st.integers(2, 4))
def test_fractional_costs_are_cut_as_well_as_can_be(costs: list[float], num_stages: int) -> None:
    num_stages = min(num_stages, len(costs))

    def largest(bounds: list[tuple[int, int]]) -> float:
        return max(sum(costs[start:stop]) for start, stop in bounds)

    best = min(largest(cut) for cut in all_cuts(len(costs), num_stages))
    assert largest(balanced(costs, num_stages)) <= best * (1 + 1e-9) + 1e-9


def test_among_cuts_with_the_same_largest_stage_the_most_even_is_taken() -> None:
    assert balanced([9, 1, 1, 1, 1, 1, 1], 3) == [(0, 1), (1, 4), (4, 7)]
    assert balanced([0, 0, 0], 3) == [(0, 1), (1, 2), (2, 3)]


def test_hundreds_of_layers_are_cut_into_many_stages() -> None:
    bounds = balanced([1.0 + index % 3 for index in range(240)], 16)
    assert max(stop - start for start, stop in bounds) <= 16
    assert [start for start, _ in bounds[1:]] == [stop for _, stop in bounds[:-1]]


def test_layers_of_one_cost_are_cut_by_their_number() -> None:
    sizes = [stop - start for start, stop in balanced([1.0] * 7, 3)]
    assert sorted(sizes) == [2, 2, 3]


def test_too_few_layers_are_counted_in_the_error() -> None:
    with pytest.raises(
        ConfigError, match="the model has 2 layers that a pipeline can cut between, too few for 3 stages"
    ):
        balanced([1, 2], 3)


def test_names_begin_stages_and_a_module_begins_at_its_first_layer() -> None:
    assert by_names(NAMES, ["blocks.1", "head"]) == [(0, 3), (3, 6), (6, 7)]
    assert by_names(NAMES, ["stem", "blocks.0", "relu@2"], 3) == [(0, 1), (1, 5), (5, 7)]


def test_an_unknown_name_is_answered_with_the_nearest_and_all_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"no layer 'blocks.3'. Did you mean 'blocks.1'\? The layers are: stem, blocks.0"
    ):
        by_names(NAMES, ["blocks.3"])


def test_names_out_of_order_or_too_few_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'blocks\.1' is layer 3, and the stage before begins at layer 6"):
        by_names(NAMES, ["head", "blocks.1"])
    with pytest.raises(ConfigError, match=r"the names make 2 stages, and the pipeline has 4. Name the 3 layers"):
        by_names(NAMES, ["head"], 4)
