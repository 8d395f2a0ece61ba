"""Parameters of optimizers and schedules that no class would refuse."""

from __future__ import annotations

from typing import Any

import pytest

from orchestray.platform.errors import ConfigError
from support.layouts import layout_settings


@pytest.mark.parametrize(
    ("key", "section"),
    [
        ("optimizer", {"type": "torch.optim:SGD", "lr": 0.1, "weight_decay": float("nan")}),
        ("lr_schedule", {"type": "torch.optim.lr_scheduler:ExponentialLR", "gamma": float("nan")}),
    ],
)
def test_an_argument_of_a_class_that_is_nan_is_refused_by_its_name(key: str, section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"train\.{key}: {[*section][-1]} must be a number, got nan"):
        layout_settings(**{key: section})
