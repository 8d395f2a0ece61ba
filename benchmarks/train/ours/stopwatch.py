"""Checkpoint writers that time how long they keep the training loop waiting: ours, and two synchronous ones."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orchestray.platform.run.checkpoint import CheckpointWriter


class Stopwatch(CheckpointWriter):
    """Our writer; `waited_s[step]` is what the save of a step costs the loop: beginning, and waiting for the copy."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory, keep=1)
        self.waited_s: dict[int, float] = {}
        self.on_disk_s: dict[int, float] = {}
        self._step = 0

    def save_async(
        self,
        step: int,
        model: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        state: Mapping[str, Any],
        *,
        buffers: Collection[str] = (),
    ) -> Any:
        began_s = time.perf_counter()
        pending = super().save_async(step, model, optimizer, state, buffers=buffers)
        self._step = step
        self.waited_s[step] = time.perf_counter() - began_s
        return pending

    def wait_copied(self) -> None:
        began_s = time.perf_counter()
        super().wait_copied()
        if self._step:
            self.waited_s[self._step] += time.perf_counter() - began_s


class Synchronous:
    """Writer that saves while the loop waits, as a script does: the file, fsync, a rename, fsync of the directory."""

    def __init__(self, directory: str, kind: str) -> None:
        self.waited_s: dict[int, float] = {}
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._kind = kind

    def prepare(self, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """Do nothing: there is nothing to make ready."""

    def wait_copied(self) -> None:
        """Do nothing: nothing is under way."""

    def wait(self) -> None:
        """Do nothing: nothing is under way."""

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def save_async(
        self,
        step: int,
        model: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        state: Mapping[str, Any],
        *,
        buffers: Collection[str] = (),
    ) -> None:
        began_s = time.perf_counter()
        temporary, place = self._directory / "checkpoint.tmp", self._directory / "checkpoint"
        if self._kind == "torch.save":
            torch.save({"model": dict(model), "optimizer": dict(optimizer), "state": dict(state)}, temporary)
        else:
            from safetensors.torch import save_file

            save_file({**model, **optimizer}, temporary, metadata={"state": json.dumps(dict(state))})
        for path in (temporary, self._directory):
            if path is self._directory:
                temporary.rename(place)
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        self.waited_s[step] = time.perf_counter() - began_s
