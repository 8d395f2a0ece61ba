"""A task with several inputs, as the text of a user's file, and runs of it."""

from __future__ import annotations

from pathlib import Path

from support.served import written_run

PAIRS = """
import pyarrow as pa
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x, mask):
        return x + self.down(torch.relu(self.up(x))) * mask[..., None]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, ids, mask, kind="sum"):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x.sum(1) if kind == "sum" else x.mean(1))


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, positions):
        positions = positions.detach().requires_grad_()
        energy = self.net(positions)
        return {"energy": energy, "force": -torch.autograd.grad(energy.sum(), positions)[0]}


class Pairs:
    def __init__(self, how="mapping"):
        self.how = how

    def build_model(self):
        return Energy() if self.how == "energy" else Model()

    def dataset(self, split):
        return pa.table({"x": [1.0, 2.0, 3.0, 4.0, 5.0]})

    def to_batch(self, columns):
        n = len(columns)
        ids, mask = torch.arange(4 * n).view(n, 4) % 20, torch.ones(n, 4)
        return {"inputs": {
            "mapping": {"mask": mask, "ids": ids, "kind": "mean"},
            "tuple": (ids, mask),
            "scalar": (ids, torch.tensor(1.0)),
            "energy": torch.ones(n, 3),
        }[self.how]}

    def loss(self, outputs, batch):
        return outputs.mean()

    def metrics(self, outputs, batch):
        return {}
"""


def pairs_run(folder: Path, how: str) -> Path:
    """Write the run of an untrained model."""
    file = folder / f"{how}.py"
    file.write_text(PAIRS)
    return written_run(folder, f"run-{how}", task={"type": f"{file}:Pairs", "how": how})
