"""Batches that grow and noise that is measured are refused where they cannot hold, in a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.config.settings import ReplicaSettings

STEPS = {"type": "steps", "every_steps": 3, "max_batch_size": 256}
MEASURED = {"type": "noise_scale", "max_batch_size": 256}


def config(network: dict[str, Any], strategy: dict[str, Any], **train: Any) -> Any:
    chosen = {"batch_size": 64, "optimizer": {"type": "sgd", "lr": 0.1}, **train}
    if "epochs" not in train:
        chosen["steps"] = 10
    strategy = {"network": network, **strategy}
    return load_train_config({"name": "batches", "task": {"type": "digits"}, "train": chosen, "strategy": strategy})


@pytest.mark.parametrize(
    ("network", "strategy", "train", "message"),
    [
        (
            {"data": 2},
            {"exchange": {"type": "parameter_server"}},
            {"batch_schedule": STEPS},
            "not there under parameter",
        ),
        ({"pipeline": 2}, {}, {"batch_schedule": STEPS}, "micro-batches of one size"),
        ({}, {}, {"batch_schedule": {**STEPS, "max_batch_size": 32}}, r"at least train.batch_size \(64\), got 32"),
        ({}, {}, {"batch_schedule": STEPS, "drop_last": True}, "number of samples that changes with the batch"),
        ({}, {}, {"batch_schedule": STEPS, "average": {"type": "swa"}}, "give every_steps and from_step"),
        ({}, {}, {"batch_schedule": {**STEPS, "every_epochs": 2}}, "give one of them"),
        ({"data": 2}, {}, {"batch_schedule": {**MEASURED, "type": "variance"}}, "give one of them"),
        ({"data": 2}, {}, {"batch_schedule": MEASURED, "epochs": 2}, "give train.steps instead"),
        ({}, {}, {"batch_schedule": MEASURED}, "there is one part: one worker and one micro-batch"),
        ({}, {}, {"noise_scale": {}}, "set train.accumulate to 2 or more, or strategy.network.data"),
        ({"data": 2}, {"exchange": {"shard": "optimizer"}}, {"noise_scale": {}}, "where whole gradients are summed"),
        ({"data": 2}, {"exchange": {"type": "gossip"}}, {"noise_scale": {}}, "where whole gradients are summed"),
        ({"data": 2, "tensor": 2}, {}, {"noise_scale": {}}, "where each worker has the whole network"),
        ({"data": 2}, {"compression": {"type": "qsgd"}}, {"noise_scale": {}}, "qsgd changes the sum"),
        ({"data": 5}, {"aggregation": {"type": "median"}}, {"noise_scale": {}}, "median changes the sum"),
        ({"data": 2}, {}, {"noise_scale": {}, "loss_is": "between_samples"}, "another in each part"),
        ({"data": 2}, {}, {"noise_scale": {}, "recompute": "blocks"}, "use recompute: none"),
        (
            {},
            {},
            {"lr_scaling": {"base_batch_size": 32}, "optimizer": {"type": "yellowfin"}},
            "yellowfin tunes its own",
        ),
    ],
)
def test_what_cannot_hold_is_refused(
    network: dict[str, Any], strategy: dict[str, Any], train: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config(network, strategy, **train)


def test_a_schedule_that_needs_measurements_turns_them_on() -> None:
    def settings(**train: Any) -> ReplicaSettings:
        return ReplicaSettings.from_config(config({"data": 2}, {}, **train), storage="", model_directory="")

    assert settings(batch_schedule=MEASURED).noise_scale == {"decay": 0.95}
    assert settings(batch_schedule=MEASURED, noise_scale={"decay": 0.5}).noise_scale == {"decay": 0.5}
    assert settings(batch_schedule=STEPS).noise_scale is None


@pytest.mark.parametrize(("rule", "factor"), [("linear", 8.0), ("sqrt", 8.0**0.5)])
def test_all_rates_of_the_optimizer_are_scaled_with_the_batch(rule: str, factor: float) -> None:
    optimizer = {"type": "sgd", "lr": 0.1, "groups": [{"match": "*.bias", "lr": 0.2}, {"match": "*", "momentum": 0.5}]}
    made = config({}, {}, batch_size=256, optimizer=optimizer, lr_scaling={"rule": rule, "base_batch_size": 32})
    scaled = ReplicaSettings.from_config(made, storage="", model_directory="").optimizer
    assert scaled["lr"] == pytest.approx(0.1 * factor)
    assert scaled["groups"][0]["lr"] == pytest.approx(0.2 * factor)
    assert "lr" not in scaled["groups"][1]
