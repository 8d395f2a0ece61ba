"""The minibatch size trades samples a second for accuracy, with the best rate for each size."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from orchestray.trainers.analysis.brent import most_time
from orchestray.trainers.analysis.trace import traced
from orchestray.trainers.survey.convergence.batch_regions import StepTime, regions
from orchestray.trainers.survey.lab import minibatches
from orchestray.trainers.survey.lab.minibatches import Training, best_of_rates
from orchestray.trainers.survey.lab.timing import threads, times_s

PROCESSORS = 20_000
OPERATION_S = 1e-9


def bound_s(batch_size: int) -> float:
    """Return Brent's bound on a step's forward and backward pass: no clock is needed, nor a quiet machine."""
    training = Training(batch_size, 0.1)
    training.network.to("meta")
    images, labels = torch.empty(batch_size, 1, 8, 8, device="meta"), torch.zeros(batch_size, dtype=torch.int64)
    graph = traced(lambda: training.loss(images, labels.to("meta")).backward())  # type: ignore[no-untyped-call]
    return OPERATION_S * most_time(graph.work, graph.depth, PROCESSORS)


def test_samples_a_second_rise_and_saturate_and_accuracy_falls_after_as_many_passes() -> None:
    sizes = (8, 64, 1024)
    steps_s = [bound_s(size) for size in sizes]
    speeds = [size / step_s for size, step_s in zip(sizes, steps_s, strict=True)]
    accuracies = {size: best_of_rates(size, (0.02, 0.2), epochs=3)[0] for size in sizes}
    assert speeds[1] > 2 * speeds[0]
    assert speeds[1] < speeds[2] < 2 * speeds[1]
    assert accuracies[1024] < accuracies[64] - 0.2
    assert abs(accuracies[64] - accuracies[8]) < 0.05
    found = regions(accuracies, StepTime.fitted(sizes, steps_s), tolerance=0.05)
    assert found == {8: "A", 64: "B", 1024: "C"}


def test_measured_samples_a_second_rise_with_the_minibatch_and_saturate() -> None:
    sizes = (1, 8, 256, 1024)
    with threads(1):
        taken = times_s({str(size): Training(size, 0.1).step for size in sizes}, rounds=9, clock=time.thread_time)
    speeds = [size / min(taken[str(size)]) for size in sizes]
    assert speeds[1] > 2 * speeds[0]
    assert speeds[2] > speeds[1]
    assert 0.5 < speeds[3] / speeds[2] < 2


def test_each_row_is_a_size_with_its_time_and_its_best_rate() -> None:
    exhibit = minibatches.minibatches(1, sizes=(64, 256), rates=(0.02, 0.2), epochs=1)
    rows: list[dict[str, Any]] = [dict(zip(exhibit.columns, row, strict=True)) for row in exhibit.rows]
    assert [row["batch"] for row in rows] == [64, 256]
    for row in rows:
        assert row["samples/s"] == pytest.approx(1e3 * row["batch"] / row["step, ms"])
        assert row["best rate"] == 0.2
        assert row["seconds"] == pytest.approx(1e-3 * row["steps to 0.95"] * row["step, ms"])
    assert len(exhibit.findings) == 4


def test_steps_to_the_target_are_those_of_the_quickest_rate_and_none_where_no_rate_comes_to_it() -> None:
    accuracy, lr, steps = best_of_rates(128, (0.001, 0.2), epochs=1)
    assert (accuracy, lr) == (Training(128, 0.2).learn(1).accuracy, 0.2)
    assert steps == Training(128, 0.2).learn(1).steps_to_target
    assert best_of_rates(128, (1e-6,), epochs=1)[2] is None


def test_steps_to_the_target_fall_with_the_batch_at_first_and_far_less_later() -> None:
    sizes = (8, 32, 128, 512)
    steps = {size: best_of_rates(size, (0.02, 0.2), epochs=3)[2] for size in sizes}
    found = [number for number in steps.values() if number is not None]
    assert len(found) == len(sizes)
    # Four times the batch takes nearly a quarter of the steps at first, as with perfect scaling, and later over half.
    assert found[0] / found[1] > 2.5
    assert 1 <= found[2] / found[3] < 2
    sentence = minibatches.scaling_of(steps)
    assert sentence is not None
    assert sentence.startswith(
        f"Steps to 0.95 fall {found[0] / found[1]:.2g} times from 8 to 32, 4 times the batch, and "
    )
    assert minibatches.scaling_of({8: 100, 32: None, 64: 20}) is None


def test_every_sample_is_used_once_a_pass_whatever_the_size() -> None:
    training = Training(100, 0.1)
    for _ in range(15):
        training.step()
    left = torch.cat(training._order)
    assert len(left) == 2 * 1438 - 1500
    assert len(set(left.tolist())) == len(left)
