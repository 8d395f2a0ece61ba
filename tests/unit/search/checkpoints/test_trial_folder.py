"""A checkpoint in Tune's storage is read back as it was written; a damaged one is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from orchestray.platform.errors import CheckpointError
from orchestray.search.checkpoints.trial_folder import STATE_FILE, read_config, read_state, write_state
from orchestray.search.trials.program import TrialState
from support.search_loop import base

STATE = TrialState({"model/weight": torch.arange(3.0), "optimizer/step": torch.tensor(4)}, {"step": 4, "epoch": 1})


def written(folder: Path) -> Path:
    from orchestray.trainers.config.load import load_train_config

    write_state(folder, load_train_config(base()), STATE)
    return folder


def test_a_state_is_read_back_with_its_config(tmp_path: Path) -> None:
    found = read_state(written(tmp_path))
    assert found.position == STATE.position
    assert found.tensors.keys() == STATE.tensors.keys()
    assert all(found.tensors[name].equal(tensor) for name, tensor in STATE.tensors.items())
    assert read_config(tmp_path).train.batch_size == 8


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = written(tmp_path) / STATE_FILE
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=STATE_FILE):
        read_state(tmp_path)


def test_another_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a checkpoint of a trial"):
        read_state(tmp_path)
