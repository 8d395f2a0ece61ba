"""Degrees, ranks and groups: arithmetic."""

from __future__ import annotations

from itertools import product

import pytest

from orchestray.trainers.layout.degrees import AXES, Coordinate, Layout

LAYOUTS = [Layout(data=d, tensor=t, pipeline=p) for d, t, p in product((1, 2, 3), repeat=3)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_and_coordinates_are_one_to_one(layout: Layout) -> None:
    coordinates = [layout.coordinate(rank) for rank in range(layout.size)]
    assert len(set(coordinates)) == layout.size == layout.data * layout.tensor * layout.pipeline
    assert [layout.rank(c.data, c.pipeline, c.tensor) for c in coordinates] == list(range(layout.size))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_groups_of_an_axis_share_out_all_ranks(layout: Layout) -> None:
    for axis in AXES:
        groups = {tuple(layout.group(rank, axis)) for rank in range(layout.size)}
        assert sorted(rank for group in groups for rank in group) == list(range(layout.size))
        assert {len(group) for group in groups} == {getattr(layout, axis)}


def test_tensor_neighbours_have_consecutive_ranks_then_come_the_stages_then_the_replicas() -> None:
    layout = Layout(data=2, tensor=2, pipeline=2)
    assert [layout.coordinate(rank) for rank in range(4)] == [
        Coordinate(data=0, pipeline=0, tensor=0),
        Coordinate(data=0, pipeline=0, tensor=1),
        Coordinate(data=0, pipeline=1, tensor=0),
        Coordinate(data=0, pipeline=1, tensor=1),
    ]
    assert layout.group(5, "tensor") == [4, 5]
    assert layout.group(5, "pipeline") == [5, 7]
    assert layout.group(5, "data") == [1, 5]
    assert layout.model_group(5) == [4, 5, 6, 7]


def test_a_degree_below_one_and_a_rank_outside_are_refused() -> None:
    with pytest.raises(ValueError, match="degree of tensor must be >= 1, got 0"):
        Layout(tensor=0)
    with pytest.raises(ValueError, match="ranks 0 to 1, got 2"):
        Layout(data=2).coordinate(2)
