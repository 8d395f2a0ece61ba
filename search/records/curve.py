"""The learning curve of a trial, as a run has it in `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_TRAIN_LOSS = "train_loss"


def curve_of(reports: Iterable[Mapping[str, Any]], trial: int, until_step: int) -> list[dict[str, Any]]:
    """Lines of a run: what a trial has reported of the training and of the validation, in the order of its steps.

    Args:
        reports: lines of `reports.jsonl`, in order; of a trial that was begun again the last line of a step counts.
        trial: whose.
        until_step: later ones are left out.
    """
    by_step = {int(line["step"]): line for line in reports if line["trial"] == trial and line["step"] <= until_step}
    curve: list[dict[str, Any]] = []
    for step, line in sorted(by_step.items()):
        place = {"step": step, "time_s": line.get("time_s")}
        metrics = dict(line["metrics"])
        if (loss := metrics.pop(_TRAIN_LOSS, None)) is not None:
            curve.append({**place, "split": "train", "loss": loss})
        curve.append({**place, "split": "validation", **metrics})
    return curve
