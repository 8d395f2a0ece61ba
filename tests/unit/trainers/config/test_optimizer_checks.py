"""Optimizers that need more than the gradient of each parameter are refused where they would not have it."""

from __future__ import annotations

from typing import Any

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.trainers.config.load import load_train_config

KFAC = {"type": "kfac", "lr": 0.1}


def load(optimizer: dict[str, Any], strategy: dict[str, Any]) -> None:
    train = {"batch_size": 32, "steps": 4, "optimizer": optimizer}
    load_train_config({"name": "run", "task": {"type": "digits"}, "train": train, "strategy": strategy})


@pytest.mark.parametrize(
    ("strategy", "place"),
    [
        ({"network": {"data": 2}, "exchange": {"type": "allreduce", "shard": "optimizer"}}, "strategy.exchange.shard"),
        ({"network": {"tensor": 2}}, "strategy.network.tensor"),
        ({"network": {"pipeline": 2}}, "strategy.network.pipeline"),
        ({"network": {"data": 2}, "exchange": {"type": "averaging", "every": 2}}, "strategy.exchange.type"),
        ({"network": {"data": 2}, "exchange": {"type": "parameter_server"}}, "strategy.exchange.type"),
        ({"network": {"data": 2}, "compression": {"type": "onebit"}}, "strategy.compression.type"),
        ({"network": {"data": 5}, "aggregation": {"type": "krum", "byzantine": 1}}, "strategy.aggregation.type"),
    ],
)
def test_kfac_is_refused_where_no_replica_has_the_whole_model(strategy: dict[str, Any], place: str) -> None:
    with pytest.raises(ConfigError, match=f"{place}: kfac") as caught:
        load(KFAC, strategy)
    assert "use " in str(caught.value).lower()
    load({"type": "sgd", "lr": 0.1}, strategy)  # it is the optimizer that does not fit


def test_kfac_has_no_groups_and_no_part_in_meetings() -> None:
    with pytest.raises(ConfigError, match=r"train\.optimizer\.groups: kfac"):
        load({**KFAC, "groups": [{"match": "*.bias", "weight_decay": 0.1}]}, {})
    exchange = {"type": "averaging", "every": 2, "outer_optimizer": KFAC}
    with pytest.raises(ConfigError, match=r"strategy\.exchange\.outer_optimizer\.type: kfac"):
        load({"type": "sgd", "lr": 0.1}, {"network": {"data": 2}, "exchange": exchange})


def test_inverses_are_made_when_there_are_fresh_statistics() -> None:
    with pytest.raises(ConfigError, match=r"inverse_every \(10\) must be a multiple of statistics_every \(3\)"):
        load({**KFAC, "statistics_every": 3}, {})


@pytest.mark.parametrize("more", [{"quantize": {"type": "twn"}}, {"weight_norm": True}])
def test_kfac_moves_weights_that_are_nothing_else_s_parts(more: dict[str, Any]) -> None:
    (key,) = more
    train = {"batch_size": 8, "steps": 2, **more}
    with pytest.raises(ConfigError, match=rf"train\.{key}: kfac moves weights by those of their layer"):
        load_train_config({"name": "a", "task": {"type": "digits"}, "train": {**train, "optimizer": KFAC}})
