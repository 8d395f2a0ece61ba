"""The state of a trial with which another one goes on."""

from __future__ import annotations

from orchestray.search.trials.program import taken_over
from orchestray.search.trials.training import TrainingTrial
from orchestray.trainers.config.load import load_train_config
from support.search_loop import base

PATIENCE = 2


def trial() -> TrainingTrial:
    """Return a trial that learns next to nothing, so that no validation is better than its first."""
    data = base()
    data["train"] |= {"steps": 20, "validate_every_steps": 1, "optimizer": {"type": "sgd", "lr": 1e-9}}
    data["train"]["early_stopping"] = {"metric": "accuracy", "patience": PATIENCE}
    return TrainingTrial(load_train_config(data))


def test_a_trial_that_goes_on_from_one_whose_patience_was_used_up_has_the_whole_patience() -> None:
    ended, other = trial(), trial()
    progress = ended.advance(20)
    assert progress.is_over
    assert progress.step == 1 + PATIENCE
    other.load(taken_over(ended.state()))
    after = other.advance(20)
    assert after.is_over
    assert after.step == progress.step + PATIENCE
