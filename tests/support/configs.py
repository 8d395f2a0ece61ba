"""A config that is right, and what is wrong with it once some keys are changed."""

from __future__ import annotations

from typing import Any

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.trainers.config.load import load_train_config

GOOD: dict[str, Any] = {
    "name": "a",
    "task": {"type": "digits"},
    "train": {"batch_size": 8, "steps": 3, "optimizer": {"type": "sgd", "lr": 0.1}},
}


def problems_of(source: Any, *overrides: str, name: str | None = None) -> list[str]:
    """Return the lines a user reads, "config: <key>: <sentence>" each; fail if there are none."""
    with pytest.raises(ConfigError) as caught:
        load_train_config(source, overrides, name=name)
    assert caught.value.exit_status == 2
    assert str(caught.value).splitlines() == list(caught.value.problems)
    return list(caught.value.problems)


def server(keys: str) -> str:
    return f"strategy.exchange={{type: parameter_server, {keys}}}"


def gossip(keys: str) -> str:
    return f"strategy.exchange={{type: gossip, {keys}}}"


def averaging(keys: str) -> str:
    return f"strategy.exchange={{type: averaging, {keys}}}"
