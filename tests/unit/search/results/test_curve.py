"""The curve of a trial in the words of a run."""

from __future__ import annotations

from typing import Any

from orchestray.search.results.curve import curve_of


def line(trial: int, step: int, time_s: float, **metrics: float) -> dict[str, Any]:
    return {"trial": trial, "step": step, "time_s": time_s, "metrics": metrics}


def test_a_curve_has_the_last_line_of_each_step_up_to_the_best_in_order_of_steps() -> None:
    reports = [
        line(3, 10, 1.0, loss=2.0, accuracy=0.3, train_loss=2.1),
        line(4, 10, 1.1, loss=9.0),
        line(3, 20, 2.0, loss=1.0),
        line(3, 10, 3.0, loss=1.5, accuracy=0.4, train_loss=1.6),
        line(3, 30, 4.0, loss=0.5),
    ]
    assert curve_of(reports, 3, 20) == [
        {"step": 10, "time_s": 3.0, "split": "train", "loss": 1.6},
        {"step": 10, "time_s": 3.0, "split": "validation", "loss": 1.5, "accuracy": 0.4},
        {"step": 20, "time_s": 2.0, "split": "validation", "loss": 1.0},
    ]


def test_a_line_names_the_epoch_of_its_step_counted_from_1() -> None:
    steps_per_epoch, last = 7, 30
    reports = [line(0, step, 1.0, loss=1.0) for step in range(1, last + 1)]
    epochs = round(last / steps_per_epoch, 6)  # as a result has it
    curve = curve_of(reports, 0, last, epochs)
    assert [line["epoch"] for line in curve] == [(step - 1) // steps_per_epoch + 1 for step in range(1, last + 1)]


def test_a_network_that_is_evaluated_and_not_trained_has_a_curve_of_one_point() -> None:
    reports = [line(0, 0, 1.0, loss=2.0), line(1, 0, 1.0, loss=3.0)]
    assert curve_of(reports, 0, 0, 0.0) == [
        {"step": 0, "epoch": 1, "time_s": 1.0, "split": "validation", "loss": 2.0},
    ]
