"""The learning curve of a trial, as a run has it in `metrics.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

_TRAIN_LOSS = "train_loss"


_ROUNDED = 1e-6
"""What `epochs` of a result is rounded to."""


def curve_of(
    reports: Iterable[Mapping[str, Any]], trial: int, until_step: int, epochs: float | None = None
) -> list[dict[str, Any]]:
    """Lines of a run: what a trial has reported of the training and of the validation, in the order of its steps.

    Args:
        reports: lines of `reports.jsonl`, in order; of a trial that was begun again the last line of a step counts.
        trial: whose.
        until_step: later ones are left out.
        epochs: that these steps are; None: not known, and the lines have no `epoch`.
    """
    by_step = {int(line["step"]): line for line in reports if line["trial"] == trial and line["step"] <= until_step}
    curve: list[dict[str, Any]] = []
    for step, line in sorted(by_step.items()):
        place: dict[str, Any] = {"step": step, "time_s": line.get("time_s")}
        if epochs is not None:  # the one a step belongs to, counted from 1
            passed = step * epochs / max(1, until_step)  # who evolves its weights reports at step 0, and trains none
            place = {"step": step, "epoch": max(1, math.ceil(passed - _ROUNDED)), **place}
        metrics = dict(line["metrics"])
        if (loss := metrics.pop(_TRAIN_LOSS, None)) is not None:
            curve.append({**place, "split": "train", "loss": loss})
        curve.append({**place, "split": "validation", **metrics})
    return curve
