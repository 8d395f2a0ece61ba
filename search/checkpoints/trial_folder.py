"""The checkpoint of a trial in Ray Tune's storage: a folder with the state and the config of the trial."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from orchestray.platform.errors import CheckpointError
from orchestray.platform.run.files import dump_json, storage_errors
from orchestray.trainers.config.dump import dump_yaml
from orchestray.trainers.config.load import load_train_config

if TYPE_CHECKING:
    from orchestray.search.trials.program import TrialState
    from orchestray.trainers.config.schema import TrainConfig

CONFIG_FILE, STATE_FILE, POSITION_FILE = "config.yaml", "state.safetensors", "position.json"
"""Names of the files: the config of the trial, the tensors of its state, and the rest of the state."""


def write_state(folder: Path, config: TrainConfig, state: TrialState) -> None:
    """Write a checkpoint.

    Args:
        folder: an empty folder.
        config: config of the trial.
        state: its state.

    Raises:
        StorageError: the disk is full, or not writable.
    """
    from orchestray.platform.run.tensor_file import pack

    files = {
        CONFIG_FILE: dump_yaml(config).encode(),
        POSITION_FILE: dump_json(dict(state.position)).encode(),
        STATE_FILE: pack(state.tensors),
    }
    with storage_errors(f"write {folder}"):
        for name, content in files.items():
            (folder / name).write_bytes(content)


def read_state(folder: Path) -> TrialState:
    """Return the state of a checkpoint.

    Raises:
        CheckpointError: it is damaged, or not a checkpoint of a trial.
        StorageError: it cannot be read.
    """
    import numpy as np

    from orchestray.platform.run.tensor_file import unpack
    from orchestray.search.trials.program import TrialState

    path = folder / STATE_FILE
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a checkpoint of a trial: it has no {STATE_FILE}")
    with storage_errors(f"read {folder}"):
        data, position = np.fromfile(path, dtype=np.uint8), (folder / POSITION_FILE).read_bytes()
    try:
        return TrialState(unpack(data, str(path)), json.loads(position))
    except ValueError as error:
        raise CheckpointError(f"{folder / POSITION_FILE} is damaged: {error}") from error


def read_config(folder: Path) -> TrainConfig:
    """Return the config of the trial of a checkpoint.

    Raises:
        ConfigError: it has problems.
    """
    return load_train_config(folder / CONFIG_FILE, look_at_task=False)
