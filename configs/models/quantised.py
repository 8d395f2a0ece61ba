"""Training that is aware of quantisation: the weights are rounded to 8 bits in each pass. Digits."""

import pyarrow as pa
from sklearn.datasets import load_digits
from torch import nn
from torch.ao.quantization import default_weight_only_qconfig, prepare_qat
from torch.nn.functional import cross_entropy

from orchestray import to_tensor


class Quantised:
    def build_model(self):
        model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
        model.qconfig = default_weight_only_qconfig
        return prepare_qat(model)

    def dataset(self, split):
        images, labels = load_digits(return_X_y=True)
        rows = slice(0, 1024) if split == "train" else slice(1024, 1152)
        return pa.table({"image": list(images[rows].astype("float32") / 16), "label": labels[rows]})

    def to_batch(self, columns):
        return {"inputs": to_tensor(columns["image"]), "targets": to_tensor(columns["label"])}

    def loss(self, outputs, batch):
        return cross_entropy(outputs, batch["targets"])

    def metrics(self, outputs, batch):
        return {"accuracy": (outputs.argmax(1) == batch["targets"]).float().mean()}
