"""Buffers, modes and modules that save themselves under parameter servers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestray.platform.errors import CheckpointError, ConfigError, TrainingError
from orchestray.platform.run.checkpoint import list_checkpoints, load_tensors
from orchestray.platform.run.checkpoint_files import RESUME_FILE
from orchestray.trainers.config.settings import ReplicaSettings
from support.central_run import train_central
from support.layouts import layout_settings
from support.stateful import fine_tuned, fine_tuning, task_of, trained, whole_state
from support.training import furthest, same_bits

SYNCHRONOUS = {"consistency": "synchronous"}


def settings(exchange: Any = None, **train: Any) -> ReplicaSettings:
    chosen = {"batch_size": 8, "steps": 6, "optimizer": {"type": "sgd", "lr": 0.01}, **train}
    server = {"type": "parameter_server", **(SYNCHRONOUS if exchange is None else exchange)}
    return replace(layout_settings({"data": 2, "microbatches": 1}, server, **chosen), checkpoint_keep=9)


@pytest.mark.parametrize("kind", ["assigned", "not_saved", "running_mean", "running_mean_not_saved", "calls"])
def test_buffers_are_those_of_one_process_and_a_resumed_run_has_the_same_bits(tmp_path: Path, kind: str) -> None:
    chosen = replace(settings(), checkpoint_storage=str(tmp_path / "checkpoints"), checkpoint_every_steps=3)
    run = train_central(lambda: task_of(kind), chosen, tmp_path)
    alone = layout_settings({"microbatches": 1}, batch_size=8, steps=6, optimizer={"type": "sgd", "lr": 0.01})
    (single,) = trained(task_of(kind), alone)
    expected = {name: tensor for name, tensor in whole_state(single).items() if name in run.weights}
    assert furthest(run.weights, expected) <= 1e-12
    first, last = list_checkpoints(tmp_path / "checkpoints")
    again = train_central(lambda: task_of(kind), settings(), tmp_path, checkpoint=first)
    assert same_bits(again.weights, run.weights)
    if kind == "not_saved":
        torch.testing.assert_close(load_tensors(last, RESUME_FILE)["buffer/0.size"], single.model.get_buffer("0.size"))


@pytest.mark.parametrize("exchange", [SYNCHRONOUS, {"transport": "shared_memory", "consistency": "asynchronous"}])
@pytest.mark.parametrize("kind", ["grows", "late"])
def test_a_buffer_that_grows_is_refused(tmp_path: Path, kind: str, exchange: Any) -> None:
    with pytest.raises(TrainingError, match="parameter servers keep buffers of fixed sizes"):
        train_central(lambda: task_of(kind), settings(exchange), tmp_path)


@pytest.mark.parametrize("kind", ["extra", "halved", "packed"])
def test_a_model_that_saves_itself_is_refused_at_the_start(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ConfigError, match=r"in a way of its own.*use strategy\.exchange\.type: allreduce"):
        train_central(lambda: task_of(kind), settings(), tmp_path)


def test_a_run_of_a_model_that_loads_itself_is_not_resumed_by_servers(tmp_path: Path) -> None:
    chosen = replace(settings(), checkpoint_storage=str(tmp_path / "checkpoints"), checkpoint_every_steps=3)
    train_central(lambda: task_of("flagged"), chosen, tmp_path)
    first = list_checkpoints(tmp_path / "checkpoints")[0]
    with pytest.raises(CheckpointError, match=r"does more than copy when its state is loaded .*: allreduce"):
        train_central(lambda: task_of("flagged"), settings(), tmp_path, checkpoint=first)


def test_a_frozen_backbone_stays_in_evaluation_mode(tmp_path: Path) -> None:
    chosen = settings(batch_size=12, steps=5, validate_every_steps=2, batch_norm="local")
    run = train_central(fine_tuning, chosen, tmp_path)
    torch.manual_seed(0)
    fresh = fine_tuned().double().state_dict()
    assert all(torch.equal(run.weights[name], tensor) for name, tensor in fresh.items() if name.startswith("0."))
    assert not torch.equal(run.weights["3.running_mean"], fresh["3.running_mean"])
