"""A GAN as one module with one optimizer: the generator gets the discriminator's gradient reversed."""

import numpy as np
import pyarrow as pa
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from orchestray import stack_columns


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, real, noise):
        made = self.generator(noise)
        reversed_made = 2 * made.detach() - made  # the same values, with minus the gradient
        return self.discriminator(real), self.discriminator(reversed_made)


class Circle:
    def build_model(self):
        return Gan()

    def dataset(self, split):
        rng = np.random.default_rng(0 if split == "train" else 1)
        angle, noise_x, noise_y = rng.normal(size=(3, 256 if split == "train" else 64))
        return pa.table({"x": np.cos(6 * angle), "y": np.sin(6 * angle), "noise_x": noise_x, "noise_y": noise_y})

    def to_batch(self, columns):
        return {"inputs": (stack_columns(columns, ["x", "y"]), stack_columns(columns, ["noise_x", "noise_y"]))}

    def to_training_batch(self, columns, draws):  # other noise in each epoch
        noise = torch.tensor(np.stack([draw.normal(size=2) for draw in draws]), dtype=torch.float32)
        return {"inputs": (stack_columns(columns, ["x", "y"]), noise)}

    def loss(self, outputs, batch):
        real, made = outputs
        return cross_entropy(real, torch.ones_like(real)) + cross_entropy(made, torch.zeros_like(made))

    def metrics(self, outputs, batch):
        real, made = outputs
        return {"told_apart": ((real > 0).float() + (made < 0).float()).mean() / 2}
