"""The model that serving is measured with, written as any user's task file: it takes a + c b seconds for b samples.

The same module is what the peers serve. It sleeps rather than computes: what a server adds is what is measured. Two
cores are enough for the model, the server and the load generator. With `loops` it computes in Python for each sample,
and holds the interpreter's lock meanwhile.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 16
EXAMPLE = [number / WIDTH for number in range(WIDTH)]


class Timed(nn.Module):
    """Model that doubles its inputs."""

    def __init__(self, a_s: float, c_s: float, loops: int = 0) -> None:
        super().__init__()
        self.a_s, self.c_s, self.loops = a_s, c_s, loops
        self.factor = nn.Parameter(torch.full((), 2.0))

    def forward(self, inputs: Tensor) -> Tensor:
        if (seconds := self.a_s + self.c_s * len(inputs)) > 0 and not inputs.is_meta:
            time.sleep(seconds)
        for _ in range(0 if inputs.is_meta else self.loops * len(inputs)):
            pass
        return inputs * self.factor


class Timing:
    """The task of a `Timed`."""

    def __init__(self, a_s: float = 0.0, c_s: float = 0.0, loops: int = 0) -> None:
        self.a_s, self.c_s, self.loops = a_s, c_s, loops

    def build_model(self) -> nn.Module:
        return Timed(self.a_s, self.c_s, self.loops)

    def example_inputs(self) -> Tensor:
        return torch.tensor(EXAMPLE)

    def dataset(self, split: str) -> Any:
        import pyarrow as pa

        return pa.table({"number": [0.0]})

    def to_batch(self, columns: Any) -> dict[str, Tensor]:
        return {"inputs": self.example_inputs().repeat(len(columns), 1)}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (outputs - batch["inputs"]).square().mean()

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {}
