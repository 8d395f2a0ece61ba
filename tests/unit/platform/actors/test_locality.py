"""Groups by locality: members of one node, and of nodes that follow each other, are in one."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestray.platform.actors.locality import NOWHERE, groups_of_near, homes

_NODES = st.lists(st.integers(0, 6), min_size=1, max_size=24)


@pytest.mark.parametrize(
    ("nodes", "num_groups", "wanted"),
    [
        ([5, 5, 5, 5], 2, [0, 1, 0, 1]),
        ([1, 1, 2, 2], 2, [0, 0, 1, 1]),
        ([2, 1, 2, 1], 2, [1, 0, 1, 0]),
        ([1, 2, 11, 12], 2, [0, 0, 1, 1]),  # two places of two machines each
        ([1, 1, 1, 2], 2, [0, 0, 0, 1]),  # near before even
        ([1, 1, 1, 1, 2, 2], 3, [0, 1, 0, 1, 2, 2]),
        ([1, 2, 3, 3, 3, 3], 2, [0, 0, 1, 1, 1, 1]),
    ],
)
def test_groups_are_of_members_that_are_near_each_other(nodes: list[int], num_groups: int, wanted: list[int]) -> None:
    assert groups_of_near(nodes, num_groups) == wanted


@given(nodes=_NODES, num_groups=st.integers(1, 8))
def test_a_node_is_cut_or_shared_only_where_it_must_be(nodes: list[int], num_groups: int) -> None:
    groups = groups_of_near(nodes, num_groups)
    assert all(0 <= group < num_groups for group in groups)
    pairs = set(zip(nodes, groups, strict=True))
    if len(set(nodes)) >= num_groups:
        assert len(pairs) == len(set(nodes)), "no node is cut"
        assert set(groups) == set(range(num_groups)), "no group is empty"
        assert all(a[1] <= b[1] for a, b in pairwise(sorted(pairs))), "nodes of a group follow each other"
    else:
        assert len({group for _, group in pairs}) == len(pairs), "no group is on two nodes"


@given(nodes=_NODES, num_groups=st.integers(1, 8), more=st.integers(1, 4))
def test_members_that_come_to_the_only_node_leave_the_others_where_they_are(
    nodes: list[int], num_groups: int, more: int
) -> None:
    one = [0] * len(nodes)
    assert groups_of_near([0] * (len(nodes) + more), num_groups)[: len(one)] == groups_of_near(one, num_groups)


def test_the_home_of_a_group_is_where_most_of_it_is() -> None:
    a, b, c = (1, "a"), (2, "b"), (3, "c")
    assert homes([a, b, b, c, c, c], 2) == [b, c]
    assert homes([a, a], 2) == [a, a]
    assert homes([a], 2) == [a, NOWHERE]
