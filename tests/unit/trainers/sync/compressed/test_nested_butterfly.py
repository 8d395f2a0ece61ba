"""Kylix's sparse all-reduce: indices go down and up a nested butterfly before the values, and only if they are new."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from orchestray.platform.comm.collective import Collective
from orchestray.trainers.compression.delta import gap_bytes
from orchestray.trainers.sync.compressed.nested_butterfly import NestedButterfly, degrees_of
from support.layouts import layout_settings, train_laid_out
from support.threads import run_replicas
from support.training import few_digits, furthest

LENGTH = 403
Vector = tuple[Tensor, Tensor]


def drawn(rank: int, step: int, count: int, *, of_step: int | None = None) -> Vector:
    """Draw values at random places; those of the step `of_step`, if it is given."""
    places = torch.Generator().manual_seed(100 * rank + (step if of_step is None else of_step))
    indices = torch.randperm(LENGTH, generator=places)[:count].sort().values
    values = torch.Generator().manual_seed(9000 + 100 * rank + step)
    return indices, torch.randn(count, dtype=torch.float64, generator=values)


def dense(vector: Vector) -> Tensor:
    return torch.zeros(LENGTH, dtype=torch.float64).index_copy_(0, *vector)


def summed(
    vectors: Callable[[int, int], Vector], size: int, num_steps: int, degrees: Sequence[int] | None = None
) -> tuple[list[list[Tensor]], list[list[int]], list[int]]:
    """Return each rank's sums and the bytes it sent, a step each, and how often it sent indices."""

    def run(collective: Collective) -> tuple[list[Tensor], list[int], int]:
        total = NestedButterfly(collective, LENGTH, torch.float64, degrees)
        found, sent = [], []
        for step in range(1, num_steps + 1):
            before = collective.own_bytes_sent
            found.append(total.all_reduce(*vectors(collective.rank, step)))
            sent.append(collective.own_bytes_sent - before)
        return found, sent, total.num_configurations

    found, sent, counts = zip(*run_replicas(size, run), strict=True)
    return list(found), list(sent), list(counts)


@pytest.mark.parametrize(
    ("size", "degrees"), [(2, None), (3, None), (4, None), (6, None), (6, [2, 3]), (5, None), (4, [4]), (8, [4, 2])]
)
def test_the_sum_is_the_dense_sum_and_the_same_bits_everywhere(size: int, degrees: list[int] | None) -> None:
    def vector(rank: int, step: int) -> Vector:
        return drawn(rank, step, (0, 1, 30, 200, LENGTH)[step - 1] if rank != 1 else 30)

    found, _, _ = summed(vector, size, 5, degrees)
    for step in range(1, 6):
        wanted = torch.stack([dense(vector(rank, step)) for rank in range(size)]).sum(0)
        assert float((found[0][step - 1] - wanted).abs().max()) <= 1e-12
        assert all(torch.equal(of_rank[step - 1], found[0][step - 1]) for of_rank in found)


def test_indices_are_sent_before_and_without_values_and_only_values_where_they_repeat() -> None:
    """Count the messages of four replicas by sets: halves with the one two away, quarters with the next one."""
    size, told = 4, 8 * 3  # whether indices are new, to three others

    def vector(rank: int, step: int) -> Vector:
        return drawn(rank, step, 60, of_step=7 if step < 4 else 8)

    _, sent, counts = summed(vector, size, 4)
    assert counts == [2] * size
    halves, quarters = [(0, 202), (202, 403)], [(0, 101), (101, 202), (202, 303), (303, 403)]

    def within(indices: Tensor, part: tuple[int, int]) -> Tensor:
        return indices[(indices >= part[0]) & (indices < part[1])]

    def union(ranks: Sequence[int], part: tuple[int, int]) -> Tensor:
        return torch.cat([within(vector(rank, 1)[0], part) for rank in ranks]).unique()

    for rank, steps in enumerate(sent):
        half, quarter = rank // 2, rank
        peer = rank ^ 1
        messages = [
            within(vector(rank, 1)[0], halves[1 - half]),  # down: the other half, to the replica that takes it
            within(union([rank, rank ^ 2], halves[half]), quarters[peer]),
            union(range(size), quarters[quarter]),  # up: the own quarter, and then the own half
            union(range(size), halves[half]),
        ]
        values = sum(8 * each.numel() for each in messages)
        assert steps[1] == steps[2] == told + values
        assert steps[0] == told + values + sum(8 + gap_bytes(each) for each in messages)
        assert steps[3] > steps[2]


def test_degrees_are_the_prime_factors_from_the_largest_down() -> None:
    assert [degrees_of(size) for size in (1, 2, 7, 12, 64)] == [[], [2], [7], [3, 2, 2], [2] * 6]


@pytest.mark.parametrize("network", [{"data": 3}, {"data": 4}])
def test_training_with_all_values_sent_over_it_is_the_single_process(network: dict[str, Any]) -> None:
    one = train_laid_out(few_digits, layout_settings(steps=3))
    settings = layout_settings({**network, "microbatches": 1}, {"algorithm": "butterfly"}, steps=3)
    found = train_laid_out(few_digits, replace(settings, compression={"type": "topk", "ratio": 1.0}))
    assert found.losses == pytest.approx(one.losses, rel=0, abs=1e-12)
    assert furthest(found.weights, one.weights) <= 1e-12
