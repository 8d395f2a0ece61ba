"""A task whose model holds a batch until it is let go: time to do something to the endpoint meanwhile."""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa
import torch
from torch import Tensor, nn

NUM_INPUTS = 4
_LOOK_S = 0.01


class Gate(nn.Module):
    """A module that doubles its inputs; those above 1 wait for the file `open`.

    Before it waits, it leaves the file `waits`.
    """

    def __init__(self, directory: str) -> None:
        super().__init__()
        self._directory = Path(directory)
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, inputs: Tensor) -> Tensor:
        if bool((inputs > 1).any()):
            (self._directory / "waits").touch()
            while not (self._directory / "open").exists():
                time.sleep(_LOOK_S)
        return inputs * self.factor


class Gated:
    """The task of a `Gate`; nothing is learned."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def build_model(self) -> nn.Module:
        return Gate(self._directory)

    def example_inputs(self) -> Tensor:
        return torch.zeros(NUM_INPUTS)

    def dataset(self, split: str) -> pa.Table:
        return pa.table({"x": [0.0]})

    def to_batch(self, columns: pa.Table) -> dict[str, Tensor]:
        return {"inputs": self.example_inputs().repeat(len(columns), 1)}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return outputs.mean()

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {}
