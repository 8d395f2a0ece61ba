"""The ResNet-18 of `train/ours/byo_resnet18.py`, as Accelerate's documentation has its users write it."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed  # measuring
from byo_clock import Clock  # measuring
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from transformers import ResNetConfig, ResNetForImageClassification


def dataset():
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images[:1024], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return TensorDataset(images, torch.tensor(labels[:1024]))


accelerator = Accelerator(cpu=True)
set_seed(0)  # measuring
config = ResNetConfig(
    layer_type="basic",
    depths=[2, 2, 2, 2],
    embedding_size=8,
    hidden_sizes=[8, 16, 24, 32],
    num_channels=1,
    num_labels=10,
)
model = ResNetForImageClassification(config)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(dataset(), batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
clock = Clock()  # measuring
model.train()
for _ in range(3):
    for images, labels in loader:
        optimizer.zero_grad()
        loss = model(images, labels=labels).loss
        accelerator.backward(loss)
        optimizer.step()
        clock.step(loss)  # measuring
clock.write(model)  # measuring
accelerator.end_training()
