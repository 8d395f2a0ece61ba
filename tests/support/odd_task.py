"""A task that behaves well, or in one of the ways in which a trial can fail."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from support.tiny_task import TinyTask


class OddTask(TinyTask):
    """A task that misbehaves in its third step.

    Its `behaviour` is one of `fine`, `raise`, `killed` (always), `killed_once`, `hungry` (for memory at once),
    `hoarding` (bit by bit), `slow` and `stuck`. Or it is `elsewhere`: stuck where another process than the file `only`
    names builds a model.
    """

    def __init__(self, behaviour: str, folder: str = "") -> None:
        super().__init__()
        self.behaviour, self._folder = behaviour, Path(folder)
        self._steps = 0

    def build_model(self) -> nn.Module:
        only = self._folder / "only"
        if self.behaviour == "elsewhere" and only.exists() and only.read_text() != str(os.getpid()):
            threading.Event().wait()
        return super().build_model()

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        self._steps += 1
        if torch.is_grad_enabled() and self._steps >= 3:
            self._misbehave()
        return super().loss(outputs, batch)

    def _misbehave(self) -> None:
        marker = self._folder / "killed"
        if self.behaviour == "raise":
            raise ValueError("this trial is not meant to work")
        if self.behaviour == "killed" or (self.behaviour == "killed_once" and not marker.exists()):
            if self.behaviour == "killed_once":
                marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.behaviour == "hungry":
            torch.ones(2**30)  # 4 GB
        if self.behaviour == "hoarding":
            hoard = []
            while True:
                hoard.append(torch.ones(2**18))  # 1 MB each
        if self.behaviour == "stuck":
            threading.Event().wait()
        if self.behaviour == "slow":
            time.sleep(0.02)
