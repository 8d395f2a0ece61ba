"""A graph network, for which the molecules of a batch become one graph: is a molecule a ring or a chain?"""

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from orchestray import to_tensor


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 16)
        self.layers = nn.ModuleList(nn.Linear(32, 16) for _ in range(2))
        self.head = nn.Linear(16, 2)

    def forward(self, atoms, bonds, sizes):
        nodes = self.embedding(atoms)
        for layer in self.layers:
            messages = torch.zeros_like(nodes).index_add(0, bonds[:, 1], nodes[bonds[:, 0]])
            nodes = torch.relu(layer(torch.cat([nodes, messages], dim=1)))
        molecule = torch.repeat_interleave(sizes)
        return self.head(nodes.new_zeros(sizes.shape[0], 16).index_add(0, molecule, nodes))


class Molecules:
    def build_model(self):
        return Network()

    def dataset(self, split):
        rng = np.random.default_rng(0 if split == "train" else 1)
        sizes = rng.integers(3, 9, size=256 if split == "train" else 64)
        rings = rng.integers(2, size=len(sizes))
        bonds = [[[i, (i + 1) % size] for i in range(size - 1 + ring)] for size, ring in zip(sizes, rings, strict=True)]
        return pa.table({"atoms": [rng.integers(4, size=size) for size in sizes], "bonds": bonds, "ring": rings})

    def to_batch(self, columns):
        atoms, bonds = columns["atoms"].to_pylist(), columns["bonds"].to_pylist()
        sizes = torch.tensor([len(molecule) for molecule in atoms])
        starts = sizes.cumsum(0) - sizes
        joined = torch.cat([torch.tensor(pairs) + start for pairs, start in zip(bonds, starts, strict=True)])
        inputs = {"atoms": torch.cat([torch.tensor(molecule) for molecule in atoms]), "bonds": joined, "sizes": sizes}
        return {"inputs": inputs, "targets": to_tensor(columns["ring"])}

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch["targets"])

    def metrics(self, outputs, batch):
        return {"accuracy": (outputs.argmax(1) == batch["targets"]).float().mean()}
