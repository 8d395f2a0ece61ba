"""The best checkpoint of a run under parameter servers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestray.platform.run.checkpoint import list_checkpoints
from orchestray.trainers.config.goals import Best
from orchestray.trainers.saved.checkpoint_model import load_model
from support.central_run import central_settings, train_central
from support.training import few_digits


@pytest.mark.parametrize(
    "exchange",
    [{"shards": 2, "consistency": "synchronous"}, {"groups": 2, "consistency": "synchronous"}, {}],
    ids=["synchronous", "leaves", "asynchronous"],
)
def test_the_best_is_kept_and_exported(tmp_path: Path, exchange: dict[str, Any]) -> None:
    settings = replace(
        central_settings(2, exchange, steps=5, validate_every_steps=1),
        checkpoint_storage=str(tmp_path / "checkpoints"),
        checkpoint_keep=1,
        best=Best("loss", "max"),
    )
    run = train_central(few_digits, settings, tmp_path)
    losses = {line["step"]: line["loss"] for line in run.lines if line.get("split") == "validation"}
    best = max(losses, key=lambda step: losses[step])
    assert best < 5
    assert [found.step for found in list_checkpoints(tmp_path / "checkpoints")] == [best, 5]
    assert run.outcome.summary["best"]["step"] == best
    first, last = map(load_model, list_checkpoints(tmp_path / "checkpoints"))
    assert all(torch.equal(run.weights[name], tensor) for name, tensor in first.tensors.items())
    assert not all(torch.equal(run.weights[name], tensor) for name, tensor in last.tensors.items())
