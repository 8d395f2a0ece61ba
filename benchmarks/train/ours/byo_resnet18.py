"""A narrow ResNet-18 of transformers as a user brings it: that of `configs/models/resnet18.py`; no validation."""

import pyarrow as pa
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from transformers import ResNetConfig, ResNetForImageClassification

from orchestray import to_tensor


class ResNet18:
    def build_model(self):
        config = ResNetConfig(
            layer_type="basic",
            depths=[2, 2, 2, 2],
            embedding_size=8,
            hidden_sizes=[8, 16, 24, 32],
            num_channels=1,
            num_labels=10,
        )
        return ResNetForImageClassification(config)

    def dataset(self, split):
        if split == "validation":
            return None
        images, labels = load_digits(return_X_y=True)
        return pa.table({"image": list(images[:1024].astype("float32") / 16), "label": labels[:1024]})

    def to_batch(self, columns):
        images = to_tensor(columns["image"]).reshape(-1, 1, 8, 8)
        return {"inputs": images, "targets": to_tensor(columns["label"])}

    def loss(self, outputs, batch):
        return cross_entropy(outputs.logits, batch["targets"])

    def metrics(self, outputs, batch):
        return {}
