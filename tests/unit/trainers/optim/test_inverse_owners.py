"""The workers that invert the layers, and the messages by which the others get what they lack."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from orchestray.platform.comm.collective import Collective
from orchestray.trainers.optim.inverse_owners import assign_owners, deliver, inversion_cost, owner_for
from support.threads import run_replicas


def longest(costs: list[int], firsts: list[int], num_workers: int) -> int:
    return max(sum(c for c, first in zip(costs, firsts, strict=True) if first == rank) for rank in range(num_workers))


@settings(max_examples=60, deadline=None)
@given(costs=st.lists(st.integers(1, 1000), min_size=1, max_size=6), num_workers=st.integers(1, 3))
def test_the_longest_inversions_of_a_worker_are_at_most_4_thirds_of_the_best(
    costs: list[int], num_workers: int
) -> None:
    firsts = [owners[0] for owners in assign_owners(costs, num_workers, 1.0)]
    every = product(range(num_workers), repeat=len(costs))
    best = min(longest(costs, list(chosen), num_workers) for chosen in every)
    assert longest(costs, firsts, num_workers) <= 4 / 3 * best


@pytest.mark.parametrize(("fraction", "num_owners"), [(0.0, 1), (0.25, 1), (0.5, 2), (0.75, 3), (1.0, 4)])
def test_a_fraction_of_the_workers_owns_each_layer(fraction: float, num_owners: int) -> None:
    for owners in assign_owners([5, 1, 7, 7, 2], 4, fraction):
        assert len(set(owners)) == len(owners) == num_owners
        assert all(0 <= rank < 4 for rank in owners)
        assert [owner_for(owners, rank) == rank for rank in range(4)] == [rank in owners for rank in range(4)]


def test_the_cost_of_an_inversion_is_cubic() -> None:
    assert inversion_cost((20, 10)) == 8 * inversion_cost((10, 5)) == 9000


def test_each_worker_gets_what_it_lacks_and_no_more_is_sent() -> None:
    sources = [[0, 0, 2], [1, 1, 1]]  # item 0 goes from 0 to 1; item 1 from 1 to the others

    def body(collective: Collective) -> tuple[list[Tensor | None], int]:
        rank = collective.rank
        own = [torch.full((3,), 5.0) if rank == 0 else None, torch.full((2,), 7.0) if rank == 1 else None]
        before = collective.bytes_sent
        found = deliver(collective, own, [3, 2], sources, torch.zeros(1))
        return found, collective.bytes_sent - before

    for rank, (found, sent) in enumerate(run_replicas(3, body)):
        first, second = found
        assert second is not None
        assert second.tolist() == [7.0, 7.0]
        assert (first is None) if rank == 2 else (first is not None and first.tolist() == [5.0] * 3)
        assert sent == {0: 12, 1: 16, 2: 0}[rank]
