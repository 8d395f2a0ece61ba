"""Number of workers that the trials of a search may have."""

from __future__ import annotations

from typing import Any

import pytest

from orchestray.search.config.dimensions import Choice, Integer, Uniform
from orchestray.search.config.gangs import most_workers
from orchestray.trainers.config.load import load_train_config

LR = Uniform(type="uniform", low=0.1, high=0.5)


def choice(*values: Any) -> Choice:
    return Choice(type="choice", values=values)


@pytest.mark.parametrize(
    ("base", "space", "workers"),
    [
        ({}, {}, 0),
        ({}, {"train.optimizer.lr": LR}, 0),
        ({"strategy": {"network": {"data": 3}}}, {"train.optimizer.lr": LR}, 3),
        ({"strategy": {"network": {"data": 2}}, "resources": {"spares": 1}}, {}, 3),
        ({"strategy": {"exchange": {"type": "parameter_server"}}}, {}, 1),
        ({}, {"strategy.network.data": choice(1, 4, 2)}, 4),
        ({}, {"strategy.network.data": Integer(type="integer", low=1, high=3)}, 3),
        ({"strategy": {"network": {"data": 2}}}, {"strategy.network.data": choice(1)}, 0),
        ({}, {"strategy.network.data": choice(1, 2), "strategy.network.pipeline": choice(1, 2, 3)}, 6),
        ({}, {"strategy.exchange.type": choice("allreduce", "parameter_server")}, 1),
        ({"strategy": {"network": {"data": 2}}}, {"strategy.exchange.type": choice("allreduce", "gossip")}, 2),
        ({}, {"strategy": choice({}, {"network": {"data": 2}, "exchange": {"type": "gossip"}})}, 2),
        (
            {"strategy": {"network": {"data": 2}}},
            {"strategy.compression.type": choice("none", "topk"), "strategy.network.data": choice(2, 3)},
            3,
        ),
    ],
)
def test_the_places_of_a_trial_are_enough_for_every_trial_of_the_space(
    base: dict[str, Any], space: dict[str, Any], workers: int
) -> None:
    train = {"batch_size": 8, "steps": 4, "optimizer": {"type": "sgd", "lr": 0.1}}
    config = load_train_config({"name": "a", "task": {"type": "digits"}, "train": train, **base})
    assert most_workers(config, space) == workers
