"""Images in MNIST's files: handwritten digits, or what else has come in that format (Fashion-MNIST, KMNIST, ...)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from orchestray.platform.data.tensors import to_tensor
from orchestray.platform.errors import DataError
from orchestray.trainers.tasks.classification import accuracy, cross_entropy, named_classes
from orchestray.trainers.tasks.idx import read_idx
from orchestray.trainers.tasks.layers import convolution, multilayer_perceptron

if TYPE_CHECKING:
    from torch import Tensor

    from orchestray.platform.task import Batch

_PREFIXES = {"train": "train", "validation": "t10k"}
"""Beginnings of the names of a split's files."""
_KINDS = {"images": "images-idx3-ubyte", "labels": "labels-idx1-ubyte"}


class Mnist:
    """Classification of grey images in IDX files, in a folder with the names that MNIST's have.

    Args:
        path: folder with `train-images-idx3-ubyte`, `train-labels-idx1-ubyte` and the same of `t10k`, which are for
            validation; each may end in `.gz`.
        model: "mlp", or "cnn": convolutions and pooling, then a fully connected layer.
        hidden: widths of the hidden layers of the mlp, or channels of the convolutions.
        checksums: SHA-256 by names of files, which are checked when they are read.
        num_classes: number of classes, if already known.
        size: height and width of an image, if already known.

    With `num_classes` and `size` the model is built without the data (`rebuild_arguments`).
    """

    def __init__(
        self,
        path: str,
        model: str = "mlp",
        hidden: Sequence[int] = (128, 128),
        checksums: Mapping[str, str] | None = None,
        num_classes: int | None = None,
        size: Sequence[int] | None = None,
    ) -> None:
        self._path, self._model, self._hidden = Path(path), model, list(hidden)
        self._checksums, self._known_classes, self._known_size = dict(checksums or {}), num_classes, size

    def build_model(self) -> nn.Module:
        """Return a network from images [samples, 1, height, width] to a logit for each class."""
        height, width = self.size
        if self._model == "mlp":
            return nn.Sequential(nn.Flatten(), *multilayer_perceptron(height * width, self._hidden, self.num_classes))
        layers: list[nn.Module] = []
        before = 1
        for number in self._hidden:
            layers += convolution(before, number, 3)
            before = number
            if min(height, width) > 2:
                layers.append(nn.MaxPool2d(2))
                height, width = height // 2, width // 2
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(before * height * width, self.num_classes))

    def dataset(self, split: str) -> pa.Table:
        """Return the columns `image` (uint8, row by row) and `label`.

        Raises:
            DataError: a file is missing, damaged, or does not belong to the others.
        """
        images, labels = self._read(split, "images"), self._read(split, "labels")
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            raise DataError(
                f"the {split} files in {self._path} do not belong together: the images have the sizes "
                f"{list(images.shape)}, the labels {list(labels.shape)}; wanted [n, height, width] and [n]"
            )
        pixels = pa.array(np.ascontiguousarray(images).reshape(-1))
        rows = pa.FixedSizeListArray.from_arrays(pixels, images.shape[1] * images.shape[2])
        return pa.table({"image": rows, "label": labels.astype(np.int64)})

    def to_batch(self, columns: pa.Table) -> Batch:
        """Return `inputs` [samples, 1, height, width] from 0 to 1, and `targets`."""
        images = to_tensor(columns["image"], "image").to(torch.float32) / 255
        return {"inputs": images.reshape(-1, 1, *self.size), "targets": to_tensor(columns["label"], "label")}

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return cross_entropy(outputs, batch)

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"accuracy": accuracy(outputs, batch)}

    def encode(self, outputs: Tensor) -> dict[str, Any]:
        """Return the likeliest class of an image, and probabilities."""
        return named_classes(outputs, self.class_names)

    def example_inputs(self) -> Tensor:
        """Return an image without ink."""
        return torch.zeros(1, *self.size)

    def rebuild_arguments(self) -> dict[str, Any]:
        """Return additional arguments with which the same model is built without the data."""
        return {"num_classes": self.num_classes, "size": list(self.size)}

    @property
    def class_names(self) -> tuple[int, ...]:
        """Numbers of the classes."""
        return tuple(range(self.num_classes))

    @cached_property
    def num_classes(self) -> int:
        """The largest label of the training data and one."""
        if self._known_classes is not None:
            return self._known_classes
        return int(self._read("train", "labels").max(initial=0)) + 1

    @cached_property
    def size(self) -> tuple[int, int]:
        """Height and width of an image."""
        height, width = self._known_size or self._read("train", "images").shape[1:]
        return int(height), int(width)

    def _read(self, split: str, kind: str) -> np.ndarray:
        name = f"{_PREFIXES[split]}-{_KINDS[kind]}"
        files = [self._path / name, self._path / f"{name}.gz"]
        file = next((file for file in files if file.is_file()), None)
        if file is None:
            raise DataError(
                f"there is no {name} in {self._path}, and no {name}.gz: set task.path to the folder with MNIST's files"
            )
        return read_idx(file, self._checksums.get(file.name))
