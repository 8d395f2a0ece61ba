"""The learning curve of a trial, in the format of a run's `metrics.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

_TRAIN_LOSS = "train_loss"


_ROUNDED = 1e-6
"""Precision to which `epochs` of a result is rounded."""


def curve_of(
    reports: Iterable[Mapping[str, Any]],
    trial: int,
    until_step: int,
    epochs: float | None = None,
    steps: int | None = None,
) -> list[dict[str, Any]]:
    """Return the training and validation metrics a trial reported, as lines of a run's log in the order of steps.

    Args:
        reports: lines of `reports.jsonl`, in order; if a trial was restarted, the last line of a step counts.
        trial: number of the trial.
        until_step: last step to include, in the unit of the search's budget.
        epochs: number of epochs in these steps; None: unknown, and the lines have no `epoch`.
        steps: number of training steps up to `until_step`; None: the unit is a step.
    """
    by_step = {int(line["step"]): line for line in reports if line["trial"] == trial and line["step"] <= until_step}
    curve: list[dict[str, Any]] = []
    for step, line in sorted(by_step.items()):
        at = step if steps is None else math.ceil(step * steps / max(1, until_step) - _ROUNDED)
        place: dict[str, Any] = {"step": at, "time_s": line.get("time_s")}
        if epochs is not None:  # the one a step belongs to, counted from 1
            # A trial that evolves its weights reports at step 0 without training.
            passed = step * epochs / max(1, until_step)
            place = {"step": at, "epoch": max(1, math.ceil(passed - _ROUNDED)), **place}
        metrics = dict(line["metrics"])
        if (loss := metrics.pop(_TRAIN_LOSS, None)) is not None:
            curve.append({**place, "split": "train", "loss": loss})
        curve.append({**place, "split": "validation", **metrics})
    return curve
