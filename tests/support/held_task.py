"""A task whose validations can be held, and a replica that dies once it has answered."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestray.platform.data.tensors import stack_columns, to_tensor
from orchestray.platform.process.pulse import PULSE
from orchestray.trainers.loop.host import ReplicaHost

_LOOK_S = 0.01
_STICKS_AT = 5
"""Number of the batch at which a process sticks."""


class Held:
    """Two classes of points and a model with batch normalisation.

    While the file `directory`/hold is there, each process that validates leaves a file `held-PID` and waits. If
    `directory`/stick is there, one process removes it, and waits for ever in one of its batches. If
    `directory`/miss is there, one process removes it, and waits for a message that the other does not send.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._num_batches = 0

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    def dataset(self, split: str) -> pa.Table:
        points = np.random.default_rng(3).normal(2.0, 3.0, size=(96, 4)).astype(np.float32)
        columns = {f"x{i}": points[:, i] for i in range(4)}
        return pa.table({**columns, "label": (points.sum(axis=1) > 8).astype(np.int64)})

    def to_batch(self, columns: pa.Table) -> dict[str, Tensor]:
        self._num_batches += 1
        if self._num_batches == _STICKS_AT:
            self._stick()
        inputs = stack_columns(columns, [f"x{i}" for i in range(4)])
        return {"inputs": inputs, "targets": to_tensor(columns["label"])}

    def _stick(self) -> None:
        """Wait for ever if the file `directory`/stick is there, which is so for one process."""
        with contextlib.suppress(FileNotFoundError):
            (self._directory / "stick").unlink()
            threading.Event().wait()

    def _miss(self) -> None:
        """Wait for a message that nobody sends if the file `directory`/miss is there, which is so for one process."""
        with contextlib.suppress(FileNotFoundError):
            (self._directory / "miss").unlink()
            with PULSE.waiting(), contextlib.suppress(RuntimeError):  # of the group, once that is left
                dist.recv(torch.zeros(1), src=1 - dist.get_rank())

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if self._num_batches >= _STICKS_AT:
            self._miss()
        return nn.functional.cross_entropy(outputs, batch["targets"])

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        if not torch.is_grad_enabled():
            wait_while(self._directory / "hold", leaving=self._directory / f"held-{os.getpid()}")
        return {"accuracy": (outputs.argmax(1) == batch["targets"]).float().mean()}


def held(directory: Path, batch_norm: str) -> dict[str, Any]:
    """Return the config of a run of two workers with the task `Held`."""
    return {
        "name": "held",
        "task": {"type": f"{Path(__file__).resolve()}:Held", "directory": str(directory)},
        "train": {
            "batch_size": 16,
            "epochs": 2,
            "optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.9},
            "batch_norm": batch_norm,
            "loss_is": "between_samples",  # held in a validation, not already where the first step checks the loss
        },
        "strategy": {"network": {"data": 2}},
    }


def wait_while(file: Path, *, leaving: Path) -> None:
    """Wait while `file` is there, and leave the file `leaving` meanwhile."""
    if file.exists():
        leaving.touch()
    while file.exists():
        time.sleep(_LOOK_S)


class DiesWithItsWorkDone(ReplicaHost):
    """A replica that as rank 0 hands over no metric line, and is killed once it has answered.

    The other ranks answer after that.
    """

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._rank0 = Path(settings.model_directory).parent / "rank0"
        self._num_calls: int | None = None

    def train(self, start: Any) -> Any:
        outcome = super().train(start)
        assert self._collective is not None
        if self._collective.rank == 0:
            self._rank0.write_text(str(os.getpid()))
            self._num_calls = 0
            return outcome
        while not self._rank0.exists() or psutil.pid_exists(int(self._rank0.read_text() or os.getpid())):
            time.sleep(_LOOK_S)
        return outcome

    def drain(self, timeout_s: float, min_interval_s: float, written_step: int) -> list[dict[str, Any]]:
        super()._report_saved()
        time.sleep(_LOOK_S)
        if self._num_calls is not None:
            self._num_calls += 1
            # The driver calls again only after it has taken in what came before: the answer among it.
            if self._num_calls > 3:
                os.kill(os.getpid(), signal.SIGKILL)
        return []
