"""A task whose model fails, or takes its time, on all inputs but zeros, so that it can be warmed up."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from support.gated_task import Gated


class Bad(Gated):
    """The task of a model that doubles its inputs, or fails, or does it late; nothing is learned."""

    def __init__(self, fails: bool = False, late_s: float = 0.0) -> None:
        self._fails, self._late_s = fails, late_s

    def build_model(self) -> nn.Module:
        return _Model(self._fails, self._late_s)


class _Model(nn.Module):
    def __init__(self, fails: bool, late_s: float) -> None:
        super().__init__()
        self._fails, self._late_s = fails, late_s
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, inputs: Tensor) -> Tensor:
        if bool((inputs != 0).any()):
            time.sleep(self._late_s)
            if self._fails:
                raise RuntimeError("this version is bad")
        return inputs * self.factor
