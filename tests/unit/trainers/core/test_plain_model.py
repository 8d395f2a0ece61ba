"""Models that a task may build, and what it may not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from orchestray.platform.errors import TaskError
from orchestray.trainers.core.plain_model import build_plain
from support.central_run import central_settings, train_central
from support.layouts import layout_settings, train_laid_out
from support.training import Rows


def on_meta() -> nn.Module:
    return nn.Linear(4, 2, device="meta")


MODELS: dict[str, tuple[Any, str]] = {
    "nothing": (lambda: None, r"must return a torch\.nn\.Module, got a NoneType"),
    "a class": (lambda: nn.Linear, r"must return a torch\.nn\.Module, got the class Linear"),
    "a function": (lambda: torch.sum, r"must return a torch\.nn\.Module, got a builtin"),
    "a lazy layer": (lambda: nn.Sequential(nn.LazyLinear(2)), r"0\.weight of the model has no shape.* with inputs"),
    "meta": (on_meta, r"weight of the model has no values, as it is on the device meta.* to_empty"),
}


@pytest.mark.parametrize("built", MODELS)
def test_what_is_no_model_or_has_no_values_to_train_is_refused_by_servers_and_replicas(
    built: str, tmp_path: Path
) -> None:
    model, said = MODELS[built]
    task = partial(Rows, np.ones((24, 4)), np.zeros(24, dtype=np.int64), model)
    with pytest.raises(TaskError, match=said):
        train_laid_out(task, layout_settings())
    with pytest.raises(TaskError, match=said):
        train_central(task, central_settings(1), tmp_path)


def test_a_model_is_looked_at_without_values_where_shapes_are_enough() -> None:
    task = Rows(np.ones((24, 4)), np.zeros(24, dtype=np.int64), lambda: nn.Linear(4, 2))
    assert build_plain(task, 0).weight.is_meta  # type: ignore[union-attr]
