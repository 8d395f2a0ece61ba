"""Gradients that wait for the rest of their batch, and their memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from orchestray.platform.errors import TrainingError
from orchestray.trainers.aggregation.base import make_aggregation
from orchestray.trainers.ps.protocol.requests import Origin
from orchestray.trainers.ps.server.batches import Batches, Push
from orchestray.trainers.ps.server.shard import Applied
from support.central import Plan, Servers, Worker, run_all


def test_a_server_needs_no_more_memory_for_gradients_than_it_has_workers() -> None:
    plan = Plan("synchronous", num_workers=2, steps=20)
    servers, taken = Servers(plan), list[Tensor]()
    shard = servers.machines[0].shard
    push = shard.push

    def noted(origin: Origin, gradient: Tensor, *rest: Any) -> Applied:
        taken.append(gradient)  # referenced, so that no other gradient gets its memory by chance
        return push(origin, gradient, *rest)

    shard.push = noted  # type: ignore[method-assign]
    run_all([Worker(plan, number, servers.channels(number)).run for number in range(2)])
    servers.close()
    assert len(taken) == 40
    assert len({gradient.data_ptr() for gradient in taken}) <= 2


@pytest.mark.parametrize("kind", ["krum", "median", "trimmed_mean"])
def test_a_batch_of_which_too_few_workers_have_samples_is_refused_in_a_sentence(kind: str) -> None:
    batches = Batches(make_aggregation(kind, byzantine=1))
    for share in (0, 1):
        batches.add(7, Push(frozenset([share]), torch.ones(3), frozenset(), None, 0.5))
    with pytest.raises(TrainingError, match=r"Only 2 workers have samples of the batch of step 7, .*drop_last"):
        batches.take(7)


@pytest.mark.parametrize("kind", ["mean", "median"])
def test_a_rule_compares_means_over_samples_and_a_parameter_is_unused_only_if_no_share_used_it(kind: str) -> None:
    batches = Batches(None if kind == "mean" else make_aggregation(kind, byzantine=1))
    shares = [(2, 9.0, 0.25, "ac"), (0, 1.0, 0.5, "ab"), (1, 2.0, 0.25, "a")]
    for share, mean, weight, unused in shares:
        batches.add(7, Push(frozenset([share]), torch.full((3,), mean * weight), frozenset(unused), None, weight))
    found = batches.take(7)
    assert found.gradient.tolist() == [3.25 if kind == "mean" else 2.0] * 3
    assert found.unused == {"a"}


@pytest.mark.parametrize("shares", [[1], [0, 2]])
def test_a_batch_that_is_taken_too_early_is_refused(shares: list[int]) -> None:
    batches = Batches(None)
    for share in shares:
        batches.add(7, Push(frozenset([share]), torch.ones(3), frozenset(), None, 0.25))
    with pytest.raises(TrainingError, match="Batch 7 is complete, and some of its shares are not there"):
        batches.take(7)
