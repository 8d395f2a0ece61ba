"""A network that grows in training: exactly what it was where a level begins, by a schedule that is logged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from orchestray.platform.errors import ConfigError
from orchestray.search.trials.one_shot.growing import GrowingNetwork, GrowingTask, Growth
from orchestray.search.trials.training import TrainingTrial
from orchestray.trainers.config.schema import TrainConfig

torch.set_num_threads(1)

TYPE = "orchestray.search.trials.one_shot.growing:GrowingTask"


def config(**task: Any) -> TrainConfig:
    section = {"type": TYPE, "task": {"type": "digits"}, "channels": 4, **task}
    train = {"batch_size": 256, "steps": 12, "validate_every_steps": 2, "optimizer": {"type": "adam", "lr": 0.01}}
    return TrainConfig.model_validate({"name": "growing", "task": section, "train": train})


def test_schedule_adds_a_level_every_so_many_steps_and_fades_it_in() -> None:
    growth = Growth(levels=3, every_steps=4, fade_steps=2)
    assert [growth.at(step) for step in range(11)] == [
        *[(0, 1.0)] * 4,
        *[(1, 0.0), (1, 0.5), (1, 1.0), (1, 1.0)],
        *[(2, 0.0), (2, 0.5), (2, 1.0)],
    ]


@pytest.mark.parametrize("shape", [(64,), (3, 16, 16), (5,)])
def test_output_at_fade_in_0_is_that_before_the_level_and_changes_continuously(shape: tuple[int, ...]) -> None:
    network = GrowingNetwork(Growth(3, 10, 5), shape, 7, channels=4)
    inputs = torch.randn(6, *shape, generator=torch.Generator().manual_seed(0))
    for level in (1, 2):
        assert torch.equal(network.at(inputs, level, 0.0), network.at(inputs, level - 1, 1.0))
        assert torch.allclose(network.at(inputs, level, 1e-6), network.at(inputs, level, 0.0), atol=1e-4)
        assert torch.allclose(network.at(inputs, level, 1 - 1e-6), network.at(inputs, level, 1.0), atol=1e-4)
        assert not torch.allclose(network.at(inputs, level, 1.0), network.at(inputs, level, 0.0), atol=1e-4)


def test_validations_log_the_schedule_and_a_state_knows_where_it_is() -> None:
    trial = TrainingTrial(config(levels=3, every_steps=4, fade_steps=2))
    trial.advance(6)
    other = TrainingTrial(config(levels=3, every_steps=4, fade_steps=2))
    other.load(trial.state())
    progress = other.advance(12)
    logged = [(line["level"], line["fade_in"]) for line in progress.evaluations]
    assert logged == [(2.0, 0.0), (2.0, 1.0), (2.0, 1.0)]
    assert int(other.state().tensors["model/passes"]) == 12


def test_numbers_that_make_no_sense_are_all_named() -> None:
    with pytest.raises(ConfigError, match=r"task\.levels: must be >= 1, got 0\n.*at most every_steps \(3\), got 5"):
        GrowingTask({"type": "digits"}, levels=0, every_steps=3, fade_steps=5)
