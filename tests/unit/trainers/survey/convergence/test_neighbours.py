"""Replicas on a graph that do not wait do what each can, and are as near the least loss as those in step."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from orchestray.trainers.survey.convergence.logistic import Logistic, drawn
from orchestray.trainers.survey.convergence.neighbours import Trained, in_step, without_waiting

SECONDS = (2.0, 1.0, 1.0, 1.0)
UNTIL_S = 2000.0
SEEDS = range(3)


@cache
def problem() -> Logistic:
    return drawn(200, 10, 3, np.random.default_rng(0))


@cache
def trained(seed: int) -> tuple[Trained, Trained]:
    return tuple(train(problem(), SECONDS, UNTIL_S, lr=0.05, seed=seed) for train in (in_step, without_waiting))  # type: ignore[return-value]


@pytest.mark.parametrize("seed", SEEDS)
def test_asynchronous_load_balancing_without_a_server_has_a_slow_replica_do_half_and_all_what_they_can(
    seed: int,
) -> None:
    synchronous, free = trained(seed)
    for steps in free.steps[1:]:
        assert free.steps[0] / steps == pytest.approx(0.5, rel=0.02)
    rates = sum(1 / each for each in SECONDS)
    assert sum(free.steps) / UNTIL_S == pytest.approx(rates, rel=0.01)
    # In step, everybody is as slow as the slow one.
    assert sum(synchronous.steps) / UNTIL_S == pytest.approx(len(SECONDS) / max(SECONDS), rel=0.1)


@pytest.mark.parametrize("seed", SEEDS)
def test_replicas_on_a_ring_that_do_not_wait_agree_nearly_and_send_a_model_a_step_to_one_neighbour(seed: int) -> None:
    synchronous, free = trained(seed)
    # Each step exchanges two models, its own and the neighbour's; in step each replica sends to both neighbours.
    assert sum(free.messages) == 2 * sum(free.steps)
    assert synchronous.messages == tuple(2 * steps for steps in synchronous.steps)
    start = float(problem().loss(np.zeros(problem().num_features))) - problem().least_loss
    assert free.error < 0.1 * start
    assert free.disagreement < 0.5
