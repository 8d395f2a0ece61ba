"""Greedy schedules of random graphs keep the bounds of work and depth."""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestray.trainers.analysis.brent import greedy_time, least_time, most_time, useful_processors


@st.composite
def graphs(draw: st.DrawFn) -> list[list[int]]:
    """Return what each of some unit operations needs of earlier ones."""
    size = draw(st.integers(1, 40))
    return [draw(st.lists(st.integers(0, max(0, number - 1)), max_size=min(number, 4))) for number in range(size)]


def depth_of(needs: list[list[int]]) -> int:
    network = nx.DiGraph()
    network.add_nodes_from(range(len(needs)))
    network.add_edges_from((need, number) for number, each in enumerate(needs) for need in each)
    return int(nx.dag_longest_path_length(network)) + 1


@given(needs=graphs(), processors=st.integers(1, 16))
def test_a_greedy_schedule_takes_no_less_than_max_w_p_and_d_and_no_more_than_w_p_plus_d(
    needs: list[list[int]], processors: int
) -> None:
    work, depth = len(needs), depth_of(needs)
    time = greedy_time(needs, processors)
    assert least_time(work, depth, processors) <= time <= most_time(work, depth, processors)
    assert greedy_time(needs, 1) == work
    assert greedy_time(needs, len(needs)) == depth


@pytest.mark.parametrize(("work", "depth"), [(1000, 10), (7, 7), (5, 0)])
def test_processors_are_useful_as_long_as_brent_s_bound_keeps_half_of_their_time_busy(work: int, depth: int) -> None:
    useful = useful_processors(work, depth)

    def busy(processors: int) -> float:
        return work / processors / most_time(work, depth, processors)

    assert busy(useful) >= 0.5
    assert depth == 0 or busy(useful + 1) < 0.5
