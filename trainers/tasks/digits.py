"""Handwritten digits: the 1,797 images of 8 x 8 pixels that come with scikit-learn.

E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998 (test set).
"""

from __future__ import annotations

import functools
import gzip
import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from torch import nn

from orchestray.platform.data.order import split_rows
from orchestray.platform.data.tensors import to_tensor
from orchestray.platform.errors import TaskError
from orchestray.trainers.tasks.classification import accuracy, cross_entropy
from orchestray.trainers.tasks.layers import multilayer_perceptron

if TYPE_CHECKING:
    from torch import Tensor

    from orchestray.platform.task import Batch

NUM_CLASSES = 10
SIDE = 8
MODELS = ("mlp", "cnn", "inception", "alexnet")
_LEAST_CHANNELS = 4
_MAX_PIXEL = 16.0


class Digits:
    """Classification of digits by a fully connected or a convolutional network.

    Args:
        hidden: widths of the hidden layers ("mlp") or of those after the convolutions ("alexnet"); or channels of the
        convolutions ("cnn") or of the blocks ("inception").
        model: "mlp" (inputs [samples, 64]); or with inputs [samples, 1, 8, 8] "cnn" (with batch normalisation),
        "inception" (blocks of four branches) or "alexnet" (two towers of convolutions, then `hidden`).
        batch_norm: True for batch normalisation in the mlp.
        dropout: probability of dropping a unit of a hidden layer; in "inception" only of the last one.
        validation_fraction: fraction of the images for validation, always the same ones.
    """

    class_names = tuple(range(NUM_CLASSES))

    def __init__(
        self,
        hidden: Sequence[int] = (128, 128),
        model: str = "mlp",
        batch_norm: bool = False,
        dropout: float = 0.0,
        validation_fraction: float = 0.2,
    ) -> None:
        if model not in MODELS:
            *others, last = map(repr, MODELS)
            raise TaskError(f"task.model must be {', '.join(others)} or {last}, got {model!r}")
        if model == "inception" and (not hidden or min(hidden) < _LEAST_CHANNELS):
            raise TaskError(
                "task.hidden must have the channels of each block of the inception network, "
                f"{_LEAST_CHANNELS} at least (one for each branch), got {list(hidden)}"
            )
        self._hidden = list(hidden)
        self._model = model
        self._batch_norm = batch_norm
        self._dropout = dropout
        self._validation_fraction = validation_fraction

    def build_model(self) -> nn.Module:
        if self._model == "cnn":
            return _convolutions(self._hidden, self._dropout)
        if self._model == "inception":
            from orchestray.trainers.tasks.inception import inception  # late, because it imports tensor parallelism

            return inception(self._hidden, NUM_CLASSES, side=SIDE, dropout=self._dropout)
        if self._model == "alexnet":
            from orchestray.trainers.tasks.alexnet import alexnet

            return alexnet(self._hidden, NUM_CLASSES, dropout=self._dropout)
        return multilayer_perceptron(
            SIDE * SIDE, self._hidden, NUM_CLASSES, dropout=self._dropout, batch_norm=self._batch_norm
        )

    def dataset(self, split: str) -> pa.Table:
        """Return the columns `image` (64 float32 from 0 to 1, row by row) and `label` (0 to 9)."""
        images, labels = _read()
        validation, training = split_rows(len(labels), self._validation_fraction)
        chosen = validation if split == "validation" else training
        pixels = pa.array(images[chosen].reshape(-1))
        return pa.table({"image": pa.FixedSizeListArray.from_arrays(pixels, SIDE * SIDE), "label": labels[chosen]})

    def to_batch(self, columns: pa.Table) -> Batch:
        images = to_tensor(columns["image"], "image")
        if self._model != "mlp":
            images = images.reshape(-1, 1, SIDE, SIDE)
        return {"inputs": images, "targets": to_tensor(columns["label"], "label")}

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return cross_entropy(outputs, batch)

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"accuracy": accuracy(outputs, batch)}

    def example_inputs(self) -> Tensor:
        """Return one image."""
        inputs: Tensor = self.to_batch(self.dataset("validation").slice(0, 1))["inputs"]
        return inputs[0]


def _convolutions(channels: Sequence[int], dropout: float) -> nn.Sequential:
    """Return 3 x 3 convolutions with batch normalisation; the first two halve the image's sides."""
    layers: list[nn.Module] = []
    before, side = 1, SIDE
    for number in channels:
        layers += [nn.Conv2d(before, number, 3, padding=1, bias=False), nn.BatchNorm2d(number), nn.ReLU()]
        before = number
        if side > 2:
            layers.append(nn.MaxPool2d(2))
            side //= 2
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(before * side * side, NUM_CLASSES))


@functools.cache  # a search trains many tasks in one process, and each reads the file for two splits
def _read() -> tuple[np.ndarray, np.ndarray]:
    """Return images [1797, 64] from 0 to 1, float32, and labels [1797], int64.

    The file is read directly, because importing scikit-learn would take a second.
    """
    spec = find_spec("sklearn")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(place) / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            rows = np.loadtxt(io.StringIO(gzip.decompress(file.read_bytes()).decode("ascii")), delimiter=",")
            images, labels = (rows[:, :-1] / _MAX_PIXEL).astype(np.float32), rows[:, -1].astype(np.int64)
            for kept in (images, labels):
                kept.flags.writeable = False
            return images, labels
    raise TaskError("the task digits reads its images from scikit-learn, which is not here: pip install scikit-learn")
