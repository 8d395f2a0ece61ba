"""`digits`: handwritten digits, 1,797 real images of 8x8 pixels that come with scikit-learn."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from orchestray.platform.data.tensors import to_tensor
from orchestray.platform.errors import DataError
from orchestray.trainers.tasks.layers import multilayer_perceptron

_NUM_PIXELS = 64
_NUM_CLASSES = 10
_MAX_VALUE = 16.0


class Digits:
    """Classification of 8x8 images (E. Alpaydin and C. Kaynak, UCI Optical Recognition of Handwritten Digits).

    Args:
        hidden: widths of the hidden layers (`mlp`), or channels of the convolutions (`cnn`).
        model: `mlp`, or `cnn` with batch normalisation.
        batch_norm: batch normalisation in the `mlp`.
        dropout: probability, after each hidden layer of the `mlp`.
        validation_fraction: part of the images that is kept for validation.
    """

    def __init__(
        self,
        hidden: Sequence[int] = (128, 128),
        model: str = "mlp",
        batch_norm: bool = False,
        dropout: float = 0.0,
        validation_fraction: float = 0.2,
    ) -> None:
        self._hidden = list(hidden)
        self._model = model
        self._batch_norm = batch_norm
        self._dropout = dropout
        self._validation_fraction = validation_fraction

    def build_model(self) -> nn.Module:
        if self._model == "cnn":
            return _convolutional(self._hidden)
        return multilayer_perceptron(
            _NUM_PIXELS, self._hidden, _NUM_CLASSES, batch_norm=self._batch_norm, dropout=self._dropout
        )

    def dataset(self, split: str) -> pa.Table:
        pixels, labels = _read_images()
        # A fixed order of its own: the split is the same whatever the seed of the run.
        order = np.random.default_rng(0).permutation(len(labels))
        num_validation = round(len(labels) * self._validation_fraction)
        chosen = order[:num_validation] if split == "validation" else order[num_validation:]
        column = pa.FixedSizeListArray.from_arrays(pa.array(pixels[chosen].reshape(-1)), _NUM_PIXELS)
        return pa.table({"image": column, "label": labels[chosen]})

    def to_batch(self, columns: pa.Table) -> dict[str, Tensor]:
        return {"inputs": to_tensor(columns["image"], "image"), "targets": to_tensor(columns["label"], "label")}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch["targets"])

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"accuracy": (outputs.argmax(dim=1) == batch["targets"]).to(torch.float32).mean()}

    def example_inputs(self) -> Tensor:
        return torch.zeros(_NUM_PIXELS)


def _convolutional(channels: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8))]
    width = 1
    for size in channels:
        layers += [nn.Conv2d(width, size, 3, padding=1), nn.BatchNorm2d(size), nn.ReLU()]
        width = size
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(width * 4, _NUM_CLASSES))


def _read_images() -> tuple[np.ndarray, np.ndarray]:
    """Pixels in [0, 1], `[1797, 64]` float32, and labels, `[1797]` int64."""
    # Importing scikit-learn takes longer than training a small model on its images does; the file is all we need.
    found = find_spec("sklearn")
    places = list(found.submodule_search_locations or []) if found else []
    files = [Path(place) / "datasets" / "data" / "digits.csv.gz" for place in places]
    file = next((file for file in files if file.exists()), None)
    if file is None:
        raise DataError("The digits come with scikit-learn, which is not installed here: pip install scikit-learn.")
    with gzip.open(file, "rt") as text:
        values = np.loadtxt(text, delimiter=",", dtype=np.float32)
    return np.ascontiguousarray(values[:, :_NUM_PIXELS] / _MAX_VALUE), values[:, _NUM_PIXELS].astype(np.int64)
