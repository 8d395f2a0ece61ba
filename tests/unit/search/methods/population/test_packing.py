"""Populations in one batched program: what their members cannot do is refused before the search."""

from __future__ import annotations

from typing import Any

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.population.packing import check_config
from orchestray.trainers.config.load import load_train_config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("average", {"type": "ema"}),
        ("until", {"metric": "loss", "value": 0.1, "mode": "min"}),
        ("time_limit_s", 60.0),
        ("early_stopping", {"metric": "loss"}),
        ("recompute", "sqrt"),
        ("quantize", {"type": "twn"}),
        ("ensemble", {"members": 2}),
        ("weight_norm", True),
    ],
)
def test_what_members_of_one_program_cannot_do_is_refused_by_its_key(key: str, value: Any) -> None:
    train = {"batch_size": 16, "epochs": 1, "optimizer": {"type": "sgd", "lr": 0.1}, key: value}
    config = load_train_config({"name": "packed", "task": {"type": "digits"}, "train": train})
    with pytest.raises(ConfigError, match=rf"packed: train\.{key}: .* packed: false"):
        check_config(config, [])


def test_members_of_one_program_have_an_optimizer() -> None:
    train = {"batch_size": 16, "epochs": 1, "solver": {"type": "hessian_free"}}
    config = load_train_config({"name": "packed", "task": {"type": "digits"}, "train": train})
    with pytest.raises(ConfigError, match=r"packed: train\.solver: .* packed: false"):
        check_config(config, [])
