"""A force field, whose forces are minus the gradient of its energy by the positions: three atoms on springs."""

import numpy as np
import pyarrow as pa
import torch
from torch import nn
from torch.nn.functional import mse_loss

from orchestray import to_tensor


class ForceField(nn.Module):
    def __init__(self):
        super().__init__()
        self.bond = nn.Sequential(nn.Linear(1, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))

    @torch.enable_grad()
    def forward(self, positions):
        positions.requires_grad_()
        bonds = (positions - positions.roll(1, dims=1)).norm(dim=-1, keepdim=True)
        energy = self.bond(bonds).sum(dim=(1, 2))
        (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        return energy, -slope


class Springs:
    def build_model(self):
        return ForceField()

    def dataset(self, split):
        rng = np.random.default_rng(0 if split == "train" else 1)
        positions = rng.normal(size=(256 if split == "train" else 64, 3, 3))
        bonds = positions - np.roll(positions, 1, axis=1)
        length = np.linalg.norm(bonds, axis=-1, keepdims=True)
        pull = bonds * (length - 1) / length
        columns = {"positions": positions, "forces": np.roll(pull, -1, axis=1) - pull}
        table = pa.table({name: list(values.astype("float32").reshape(-1, 9)) for name, values in columns.items()})
        return table.append_column("energy", pa.array(((length - 1) ** 2).sum(axis=(1, 2)).astype("float32") / 2))

    def to_batch(self, columns):
        positions, forces = (to_tensor(columns[name]).reshape(-1, 3, 3) for name in ("positions", "forces"))
        return {"inputs": positions, "forces": forces, "energy": to_tensor(columns["energy"])}

    def loss(self, outputs, batch):
        energy, forces = outputs
        return mse_loss(energy, batch["energy"]) + mse_loss(forces, batch["forces"])

    def metrics(self, outputs, batch):
        return {"force_error": (outputs[1] - batch["forces"]).abs().mean()}
