"""The ResNet-18 of `train/ours/byo_resnet18.py`, as Lightning's documentation has its users write it."""

import lightning as L  # noqa: N812 - as its documentation has it
import torch
from byo_clock import callback  # measuring
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from transformers import ResNetConfig, ResNetForImageClassification


class ResNet18(L.LightningModule):
    def __init__(self):
        super().__init__()
        config = ResNetConfig(
            layer_type="basic",
            depths=[2, 2, 2, 2],
            embedding_size=8,
            hidden_sizes=[8, 16, 24, 32],
            num_channels=1,
            num_labels=10,
        )
        self.model = ResNetForImageClassification(config)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return self.model(images, labels=labels).loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def dataset():
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images[:1024], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return TensorDataset(images, torch.tensor(labels[:1024]))


if __name__ == "__main__":
    L.seed_everything(0)  # measuring
    loader = DataLoader(dataset(), batch_size=16, shuffle=True)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, **quiet)
    trainer.callbacks.append(callback())  # measuring
    trainer.fit(ResNet18(), loader)
