"""Pipelines in virtual time, many at once, take what each alone takes in the simulation of its schedule."""

from __future__ import annotations

import numpy as np
import pytest

from orchestray.trainers.parallel.pipeline.schedules import (
    SCHEDULE_NAMES,
    default_stages_per_worker,
    make_programs,
    placement,
)
from orchestray.trainers.parallel.pipeline.simulation import simulate
from orchestray.trainers.survey.cluster.pipeline import FORWARD_SHARE, Pipelines


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
@pytest.mark.parametrize(("num_workers", "num_micro_batches"), [(1, 3), (2, 4), (4, 8)])
def test_pipelines_whose_workers_differ_take_what_each_alone_takes(
    schedule: str, num_workers: int, num_micro_batches: int
) -> None:
    compute_s = np.random.default_rng(0).random((5, num_workers)) + 0.2
    found_s = Pipelines(schedule, num_workers, num_micro_batches, transfer_s=0.01).step_s(compute_s)
    each = default_stages_per_worker(schedule)
    placed = placement(schedule, num_workers, each)
    programs = make_programs(schedule, num_workers, each, num_micro_batches)
    worker_of = {stage: worker for worker, stages in enumerate(placed) for stage in stages}
    for row, own_s in zip(compute_s, found_s, strict=True):
        part_s = [row[worker_of[stage]] / (each * num_micro_batches) for stage in sorted(worker_of)]
        forward_s = [FORWARD_SHARE * seconds for seconds in part_s]
        backward_s = [(1 - FORWARD_SHARE) * seconds for seconds in part_s]
        alone = simulate(programs, placed, forward_s, backward_s, transfer_s=0.01)
        assert own_s.max() == pytest.approx(alone.span_s, rel=1e-12)


def test_a_worker_that_is_ready_late_delays_what_needs_it_and_nothing_else() -> None:
    pipelines, compute_s = Pipelines("gpipe", 3, 4), np.full((3, 3), 12.0)
    at_once_s = pipelines.step_s(compute_s[:1])
    filled_s = 2.0  # two stages of a forward pass of 1 s before the last one has anything to do
    ready_s = np.asarray([[0.0, 0.0, filled_s], [0.0, 0.0, filled_s + 5.0], [5.0, 0.0, 0.0]])
    found_s = pipelines.step_s(compute_s, ready_s)
    assert found_s[0] == pytest.approx(at_once_s[0])
    assert found_s[1] == pytest.approx(at_once_s[0] + 5.0)
    assert found_s[2] == pytest.approx(at_once_s[0] + 5.0)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_workers", "num_micro_batches"), [(2, 2), (4, 32), (8, 16)])
def test_equal_workers_wait_for_the_bubble_of_the_closed_form(
    schedule: str, num_workers: int, num_micro_batches: int
) -> None:
    (step_s,) = Pipelines(schedule, num_workers, num_micro_batches).step_s(np.full((1, num_workers), 3.0)).max(axis=1)
    assert step_s == pytest.approx(3.0 * (num_micro_batches + num_workers - 1) / num_micro_batches)
