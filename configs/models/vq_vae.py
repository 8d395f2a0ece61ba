"""A VQ-VAE with a codebook that is learnt by its gradient, past which the encoder's goes straight through: digits."""

import pyarrow as pa
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import mse_loss

from orchestray import to_tensor


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16), nn.Unflatten(1, (4, 4)))
        self.codebook = nn.Embedding(16, 4)
        self.decoder = nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 64))

    def forward(self, images):
        encoded = self.encoder(images)
        nearest = torch.cdist(encoded, self.codebook.weight).argmin(-1)
        codes = self.codebook(nearest)
        return self.decoder(encoded + (codes - encoded).detach()), encoded, codes


class VqVae:
    def build_model(self):
        return Autoencoder()

    def dataset(self, split):
        images = load_digits().data[slice(0, 1024) if split == "train" else slice(1024, 1152)]
        return pa.table({"image": list(images.astype("float32") / 16)})

    def to_batch(self, columns):
        return {"inputs": to_tensor(columns["image"])}

    def loss(self, outputs, batch):
        images, encoded, codes = outputs
        commitment = mse_loss(encoded, codes.detach())
        return mse_loss(images, batch["inputs"]) + mse_loss(codes, encoded.detach()) + 0.25 * commitment

    def metrics(self, outputs, batch):
        return {"error": mse_loss(outputs[0], batch["inputs"])}
