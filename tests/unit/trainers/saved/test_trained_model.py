"""A trained model is read back into a fresh one, whatever its modules' way of saving."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.errors import CheckpointError
from orchestray.platform.run.checkpoint import CheckpointWriter, list_checkpoints
from orchestray.platform.run.model_files import EXTRA_FILE, load_beside
from orchestray.trainers.core.model_state import StateKeeper
from orchestray.trainers.saved.checkpoint_model import load_model
from orchestray.trainers.saved.interface import Interface
from orchestray.trainers.saved.trained_model import fill, read_model, write_model
from support.layouts import layout_settings
from support.stateful import KINDS, WIDTH, built, task_of

RESTORED = [kind for kind in [*KINDS, "nested"] if kind not in ("not_saved", "running_mean_not_saved")]
"""Kinds whose state is a part of the model that others load."""


@pytest.mark.parametrize("kind", RESTORED)
def test_the_model_that_is_read_answers_as_the_one_that_was_trained(tmp_path: Path, kind: str) -> None:
    task, precision = task_of(kind), "float32" if kind == "quantised" else "float64"
    adam = {"type": "adam", "lr": 0.01}
    settings = layout_settings({"microbatches": 1}, batch_size=8, steps=4, precision=precision, optimizer=adam)
    (replica,) = built(task, settings)
    replica.connect(SoloCollective())
    with CheckpointWriter(str(tmp_path / "checkpoints"), keep=1) as writer:
        replica.write_checkpoints_with(writer)
        replica.run(time.time())
    write_model(tmp_path / "model", replica.trained_model(), {"precision": precision}, task)
    [found] = list_checkpoints(tmp_path / "checkpoints")
    x = torch.linspace(-1, 2, 5 * WIDTH, dtype=getattr(torch, precision)).reshape(5, WIDTH)
    expected = replica.model.eval()(x)
    for state in (read_model(tmp_path / "model"), load_model(found)):
        answer = fill(task.build_model(), state, precision).eval()(x)
        torch.testing.assert_close(answer, expected, rtol=0, atol=2e-3 if kind == "halved" else 0)


def test_a_model_without_extra_state_has_no_file_of_it(tmp_path: Path) -> None:
    task = task_of("in_place")
    (replica,) = built(task, layout_settings({"microbatches": 1}, batch_size=8))
    write_model(tmp_path / "model", replica.trained_model(), {}, task, Interface(no_example="none"))
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["model.json", "model.safetensors"]
    assert load_beside(tmp_path / "model", EXTRA_FILE) == {}


def test_a_damaged_file_of_extra_state_is_named(tmp_path: Path) -> None:
    task = task_of("extra")
    (replica,) = built(task, layout_settings({"microbatches": 1}, batch_size=8))
    write_model(tmp_path / "model", replica.trained_model(), {}, task)
    path = tmp_path / "model" / EXTRA_FILE
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match=r"is damaged \(extra_state\.safetensors"):
        read_model(tmp_path / "model")


class Table(nn.Module):
    """A mask whose size depends on an argument."""

    mask: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(size))


def test_a_buffer_of_another_size_that_did_not_grow_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "model", StateKeeper(Table(3)).state(), {}, task_of("in_place"))
    with pytest.raises(CheckpointError, match=r"mask is float32 \[3\], the model's is float32 \[4\]"):
        fill(Table(4), read_model(tmp_path / "model"), "float32")


def test_files_that_a_task_wants_are_beside_the_model_but_not_beside_an_ensemble(tmp_path: Path) -> None:
    task: Any = SimpleNamespace(export_files=lambda tensors: {"more/names.txt": " ".join(tensors).encode()})
    state = StateKeeper(Table(3)).state()
    write_model(tmp_path / "model", state, {}, task)
    assert (tmp_path / "model" / "more" / "names.txt").read_text() == "mask"
    write_model(tmp_path / "model", state, {"ensemble": {"members": 2}}, task)
    assert not (tmp_path / "model" / "more").exists()
