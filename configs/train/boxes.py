"""Visual discrimination: two boxes on a field, and the centre of the larger one is to be named.

K. O. Stanley, D. B. D'Ambrosio and J. Gauci, "A Hypercube-Based Encoding for Evolving Large-Scale Neural Networks",
Artificial Life 15(2), 2009, section 4.1.
"""

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from orchestray import to_tensor


class Boxes:
    def __init__(self, side=11):
        self.side = side

    def build_model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(self.side**2, self.side**2))

    def dataset(self, split):
        rng = np.random.default_rng(0 if split == "train" else 1)
        large = self.side // 3  # and the small one has a third of its width
        small = max(1, large // 3)
        rows: list[dict[str, object]] = []
        while len(rows) < 300:
            field = np.zeros((self.side, self.side), np.float32)
            top, left = rng.integers(self.side - large + 1, size=2)
            other_top, other_left = rng.integers(self.side - small + 1, size=2)
            field[top : top + large, left : left + large] = 1
            if field[other_top : other_top + small, other_left : other_left + small].any():
                continue  # the boxes do not overlap
            field[other_top : other_top + small, other_left : other_left + small] = 1
            rows.append({"field": field.ravel(), "centre": (top + large // 2) * self.side + left + large // 2})
        return pa.Table.from_pylist(rows)

    def to_batch(self, columns):
        fields = torch.tensor(np.stack(columns["field"].to_numpy()))
        return {"inputs": fields.reshape(-1, self.side, self.side), "targets": to_tensor(columns["centre"])}

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch["targets"])

    def metrics(self, outputs, batch):
        named, centre = outputs.argmax(1), batch["targets"]
        rows, columns = named // self.side - centre // self.side, named % self.side - centre % self.side
        return {"distance": torch.hypot(rows.float(), columns.float()).mean()}  # in pixels
