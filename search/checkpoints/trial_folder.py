"""The checkpoint of a trial in Ray Tune's storage: a folder with the state and the config of the trial."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from orchestray.platform.errors import CheckpointError
from orchestray.platform.run.files import storage_errors
from orchestray.search.checkpoints import state_files
from orchestray.trainers.config.dump import dump_yaml
from orchestray.trainers.config.load import load_train_config

if TYPE_CHECKING:
    from orchestray.search.trials.program import TrialState
    from orchestray.trainers.config.schema import TrainConfig

CONFIG_FILE, STATE_FILE = "config.yaml", "state.safetensors"
"""Names of the files: the config of the trial, and its state."""


def write_state(folder: Path, config: TrainConfig, state: TrialState) -> None:
    """Write a checkpoint.

    Args:
        folder: an empty folder.
        config: config of the trial.
        state: its state.

    Raises:
        StorageError: the disk is full, or not writable.
    """
    with storage_errors(f"write {folder}"):
        (folder / CONFIG_FILE).write_text(dump_yaml(config), encoding="utf-8")
    state_files.write_state(folder / STATE_FILE, state)


def read_state(folder: Path) -> TrialState:
    """Return the state of a checkpoint.

    Raises:
        CheckpointError: it is damaged, or not a checkpoint of a trial.
        StorageError: it cannot be read.
    """
    path = folder / STATE_FILE
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a checkpoint of a trial: it has no {STATE_FILE}")
    return state_files.read_state(path)


def read_config(folder: Path) -> TrainConfig:
    """Return the config of the trial of a checkpoint.

    Raises:
        ConfigError: it has problems.
    """
    return load_train_config(folder / CONFIG_FILE, look_at_task=False)
