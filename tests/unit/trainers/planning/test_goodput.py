"""The goodput of a plan is that of a simulated run, which loses more with checkpoints half or twice as far apart."""

from __future__ import annotations

import numpy as np
import pytest

from orchestray.trainers.planning.correction import Traits
from orchestray.trainers.planning.goodput import failures_of, goodput_of
from orchestray.trainers.planning.plans import Memory, Parts, Plan
from orchestray.trainers.survey.cluster.failures import restarting

DISK = 1e8


def plan_of(step_s: float) -> Plan:
    memory = Memory(parameters=2 * 10**8, optimizer=4 * 10**8)
    return Plan("one process", Traits("t", "single", "single none"), {}, {}, 1, 64, Parts(compute_s=step_s), memory)


def simulated(step_s: float, steps: int, mtbf_h: float) -> float:
    failures = failures_of(plan_of(step_s), mtbf_h=mtbf_h, disk_bytes_per_s=DISK)
    return restarting(np.full(200_000, steps * step_s), 1, failures, np.random.default_rng(0)).goodput


@pytest.mark.parametrize("mtbf_h", [0.5, 6.0])
def test_the_goodput_is_that_of_a_simulated_run_and_other_intervals_lose_more(mtbf_h: float) -> None:
    found = goodput_of(plan_of(0.1), mtbf_h=mtbf_h, disk_bytes_per_s=DISK)
    steps = found.checkpoint_every_steps
    assert found.checkpoint_s == 6.0  # parameters and the optimizer's state
    assert found.share == pytest.approx(simulated(0.1, steps, mtbf_h), abs=0.002)
    assert max(simulated(0.1, steps // 2, mtbf_h), simulated(0.1, 2 * steps, mtbf_h)) < found.share


def test_a_step_longer_than_the_best_interval_is_one_interval_and_counts_as_that() -> None:
    found = goodput_of(plan_of(3000.0), mtbf_h=0.5, disk_bytes_per_s=DISK)
    assert (found.checkpoint_every_steps, found.interval_s) == (1, 3000.0)
    assert found.share == pytest.approx(simulated(3000.0, 1, 0.5), abs=0.002)
