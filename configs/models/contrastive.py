"""A contrastive loss between all samples of a batch, which `gather` brings together: the two halves of digits."""

import pyarrow as pa
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from orchestray import to_tensor


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
        self.right = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, left, right):
        return normalize(self.left(left)), normalize(self.right(right))


class Halves:
    def build_model(self):
        return Encoder()

    def dataset(self, split):
        images = load_digits().images[slice(0, 1024) if split == "train" else slice(1024, 1152)].astype("float32") / 16
        left, right = images[:, :, :4].reshape(-1, 32), images[:, :, 4:].reshape(-1, 32)
        return pa.table({"left": list(left), "right": list(right)})

    def to_batch(self, columns):
        return {"inputs": (to_tensor(columns["left"]), to_tensor(columns["right"]))}

    def loss(self, outputs, batch, gather):
        left, right = gather(outputs)
        return cross_entropy(left @ right.T / 0.1, torch.arange(len(left), device=left.device))

    def metrics(self, outputs, batch):
        left, right = outputs
        return {"likeness": (left * right).sum(1).mean()}
