"""The keys of a config that the training of shared weights obeys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.trainers.config.obeyed import not_obeyed

if TYPE_CHECKING:
    from orchestray.trainers.config.schema import TrainConfig

_OBEYED = {
    *("batch_size", "drop_last", "epochs", "steps", "optimizer", "lr_schedule", "lr_scaling", "grad_clip"),
    *("seed", "validate_every_steps", "loss_is", "batch_norm", "buffers"),
}
"""Keys of `train` that the training of shared weights obeys, beside `precision` in part."""
_REASONS = {
    "average": "weights that networks share are not averaged; take it out",
    "solver": "weights that networks share see another network each step; use optimizer",
    "time_limit_s": "weights that networks share train for all steps; use search.budget.trial_time_limit_s",
    "accumulate": "weights that networks share are trained on whole batches; take it out",
    **dict.fromkeys(("until", "early_stopping"), "weights that networks share train for all steps; take it out"),
}
"""Reasons why it does not obey others."""


def refused(config: TrainConfig) -> list[str]:
    """Return a sentence, which begins with the key, for all that the training of shared weights would not do."""
    otherwise = "weights that networks share are trained without it; take it out"
    problems = not_obeyed(config.train, {*_OBEYED, "precision"}, _REASONS, otherwise)
    if config.train.precision == "bfloat16":
        problems.append("train.precision: weights that networks share train in float32 or float64; choose one of them")
    if config.distill is not None:
        problems.append("distill: weights that networks share have no teacher; take it out")
    return problems
