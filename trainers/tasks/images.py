"""A task for a user's images: a folder that has a folder for each class, or a column of a Parquet table."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import nn

from orchestray.platform.config.problems import nearest
from orchestray.platform.data.images import decode_images, image_folder
from orchestray.platform.data.order import split_rows
from orchestray.platform.data.retries import read_patiently
from orchestray.platform.data.source import Streamed
from orchestray.platform.data.tensors import to_tensor
from orchestray.platform.errors import DataError, TaskError
from orchestray.trainers.tasks.classification import accuracy, cross_entropy, named_classes
from orchestray.trainers.tasks.parquet_files import check_columns, class_indices, holds_parquet, open_files, part

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from orchestray.platform.task import Batch

_WINDOW_ROWS = 4096
"""Least rows of a window of encoded images, which are some hundred times as large as rows of numbers."""
_LEAST_PART = 0.35
_MOST_STRETCHED = 4 / 3


class Images:
    """Classification of images, which are decoded in the background and changed at random for training.

    Args:
        path: folder with a folder for each class; or file, directory or `pyarrow.fs` URI of a Parquet table.
        size: side of the square to which each image is cut and resized.
        model: "cnn", or the name of a network of `torchvision.models` for classification, untrained.
        change: True to train on random parts of the images, every other one mirrored.
        image: column of a table with the encoded images: bytes, paths, or structs with `bytes` and `path`.
        label: column of a table with the class: whole numbers or text.
        validation_path: the same for validation; None: a part of the images, drawn at random, always the same one.
        validation_fraction: fraction of the images in that part.
        classes: values of the classes, if already known.

    With `classes` the model is built without the data (`rebuild_arguments`).
    """

    def __init__(
        self,
        path: str,
        size: int = 64,
        model: str = "cnn",
        change: bool = True,
        image: str = "image",
        label: str = "label",
        validation_path: str | None = None,
        validation_fraction: float = 0.1,
        classes: Sequence[Any] | None = None,
    ) -> None:
        self._path, self._validation_path = path, validation_path
        self._size, self._model, self._changes = size, model, change
        self._image, self._label = image, label
        self._validation_fraction = validation_fraction
        self._known_classes = classes

    def build_model(self) -> nn.Module:
        """Return a network from [samples, 3, size, size] to a logit for each class.

        Raises:
            TaskError: torchvision is not installed, does not fit torch, or has no such network for images of this size.
        """
        if self._model == "cnn":
            return _convolutions(len(self.classes))
        models, size = _torchvision_models(self._model), self._size
        if self._model not in (names := models.list_models(module=models)):
            hint = nearest(self._model, names)
            raise TaskError(f"task.model: torchvision has no network {self._model!r} for classification{hint}")
        options = next((own for start, own in _own_options(size).items() if self._model.startswith(start)), {})
        try:
            network: nn.Module = models.get_model(self._model, weights=None, num_classes=len(self.classes), **options)
            with torch.no_grad():
                network.eval()(torch.zeros(1, 3, size, size))
        except (RuntimeError, ValueError, AssertionError) as error:
            raise TaskError(
                f"task.size: torchvision's {self._model!r} takes no images of {size} x {size} "
                f"({str(error).splitlines()[0]}): give another size, such as 224, or another network"
            ) from error
        return network.train()

    def dataset(self, split: str) -> pa.Table | Streamed:
        """Return the images and labels of a split.

        Raises:
            TaskError: there is nothing at the path, or a column is missing.
        """
        validation = split == "validation"
        path = self._validation_path if validation and self._validation_path is not None else self._path
        is_part = self._validation_path is None
        if self._is_table:
            data = open_files(path, "task.path" if path == self._path else "task.validation_path")
            columns = [self._image, self._label]
            check_columns(columns, data.schema, path)
            if not is_part:
                schema = pa.schema([data.schema.field(name) for name in columns])
                return Streamed(data.replace_schema(schema), _WINDOW_ROWS)
            fraction = self._validation_fraction
            found = part(data, path, columns, fraction, validation=validation, window_rows=_WINDOW_ROWS)
            return found if isinstance(found, pa.Table) else Streamed(found, _WINDOW_ROWS)
        table, names = image_folder(path)
        if names != self.classes:
            raise DataError(f"the folders in {path} are {', '.join(names)}; those in {self._path} are {self.classes}")
        if not is_part:
            return table
        held_out, rest = split_rows(table.num_rows, self._validation_fraction)
        return table.take(pa.array(np.sort(held_out if validation else rest)))

    def to_batch(self, columns: pa.Table) -> Batch:
        """Return `inputs` [samples, 3, size, size] float32 from -1 to 1, and `targets` [samples] int64."""
        return self._batch(columns, decode_images(self._column(columns), self._middle))

    def to_training_batch(self, columns: pa.Table, draws: Sequence[np.random.Generator]) -> Batch:
        """Return the same of a random part of each image."""
        if not self._changes:
            return self.to_batch(columns)
        return self._batch(columns, decode_images(self._column(columns), self._random_part, draws))

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return cross_entropy(outputs, batch)

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"accuracy": accuracy(outputs, batch)}

    def example_inputs(self) -> Tensor:
        """Return an image without content."""
        return torch.zeros(3, self._size, self._size)

    def decode(self, request: Any) -> Any:
        """Return an encoded image, bytes, base64 or `data:` URL, as a tensor [3, size, size]; anything else as it is.

        Raises:
            ValueError: it is not an image.
        """
        if not isinstance(request, bytes | str):
            return request
        try:
            data = request if isinstance(request, bytes) else _of_base64(request)
            return self._scaled(decode_images(pa.chunked_array([[data]]), self._middle)[0])
        except (ValueError, DataError) as error:
            why = f": {error.__cause__}" if type(error.__cause__) is ValueError else ""
            raise ValueError(f"wanted an image, as its bytes or in base64, and this is none{why}") from None

    def encode(self, outputs: Tensor) -> dict[str, Any]:
        """Return the likeliest class, and probabilities."""
        return named_classes(outputs, self.classes)

    @property
    def example_request(self) -> str:
        """A small grey image in base64."""
        from PIL import Image

        file = io.BytesIO()
        Image.new("RGB", (1, 1), (128, 128, 128)).save(file, "PNG")
        return base64.b64encode(file.getvalue()).decode()

    def rebuild_arguments(self) -> dict[str, Any]:
        """Return additional arguments with which the same model is built without the data."""
        return {"classes": self.classes}

    @property
    def class_names(self) -> list[Any]:
        """Names of the classes, in the order of the outputs."""
        return self.classes

    @cached_property
    def classes(self) -> list[Any]:
        """Names of the folders, or values of the label, in order."""
        if self._known_classes is not None:
            return list(self._known_classes)
        if not self._is_table:
            return image_folder(self._path)[1]
        data = open_files(self._path, "task.path")
        check_columns([self._image, self._label], data.schema, self._path)
        labels = read_patiently(partial(data.to_table, columns=[self._label]), self._path)
        return sorted(pc.unique(labels[self._label]).drop_null().to_pylist())

    def _column(self, columns: pa.Table) -> pa.ChunkedArray:
        return columns[self._image if self._is_table else "image"]

    @cached_property
    def _is_table(self) -> bool:
        return holds_parquet(self._path)

    def _batch(self, columns: pa.Table, images: Tensor) -> Batch:
        return {"inputs": self._scaled(images), "targets": self._targets(columns)}

    @staticmethod
    def _scaled(images: Tensor) -> Tensor:
        return images.to(torch.float32).div_(127.5).sub_(1.0)

    def _targets(self, columns: pa.Table) -> Tensor:
        if not self._is_table:  # indices of the folders
            return to_tensor(columns["label"], "label")
        return class_indices(columns[self._label], self.classes, self._label)

    def _middle(self, image: Image.Image) -> Image.Image:
        from PIL import ImageOps

        return ImageOps.fit(image, (self._size, self._size))

    def _random_part(self, image: Image.Image, draws: np.random.Generator) -> Image.Image:
        """Return a random part of an image, perhaps mirrored (Szegedy et al., 2015, section 6)."""
        from PIL.Image import Resampling, Transpose

        width, height = image.size
        area = width * height * draws.uniform(_LEAST_PART, 1.0)
        stretched = np.exp(draws.uniform(-np.log(_MOST_STRETCHED), np.log(_MOST_STRETCHED)))
        part_width = min(width, max(1, round(np.sqrt(area * stretched))))
        part_height = min(height, max(1, round(np.sqrt(area / stretched))))
        left, top = draws.integers(width - part_width + 1), draws.integers(height - part_height + 1)
        box = (left, top, left + part_width, top + part_height)
        part_of_it = image.resize((self._size, self._size), Resampling.BILINEAR, box=box)
        return part_of_it.transpose(Transpose.FLIP_LEFT_RIGHT) if draws.random() < 0.5 else part_of_it


def _of_base64(text: str) -> bytes:
    """Return the bytes in a text, which may have lines, as the command `base64` writes it, or be a `data:` URL."""
    if text.startswith("data:"):
        text = text.partition(";base64,")[2]
    return base64.b64decode("".join(text.split()), validate=True)


def _torchvision_models(wanted: str) -> Any:
    """Return the module `torchvision.models`, or raise TaskError."""
    try:
        from torchvision import models
    except ImportError as error:
        raise TaskError(
            f"task.model: {wanted!r} is a network of torchvision, which is not here: pip install torchvision, or take "
            "the built-in 'cnn'"
        ) from error
    except (RuntimeError, OSError) as error:  # its library was built for another torch
        raise TaskError(
            f"task.model: {wanted!r} is a network of torchvision, and the one that is here does not fit torch "
            f"{torch.__version__} ({error}): install both from the same index, in releases that belong together, or "
            "take the built-in 'cnn'"
        ) from error
    return models


def _own_options(size: int) -> dict[str, dict[str, Any]]:
    """Return options of networks, by the start of their names, that take one size, or return several outputs."""
    return {
        "vit_": {"image_size": size},
        "maxvit_": {"input_size": (size, size)},
        "googlenet": {"aux_logits": False, "init_weights": True},
        "inception_v3": {"aux_logits": False, "init_weights": True},
    }


def _convolutions(num_classes: int) -> nn.Sequential:
    """Return a small network for images of any size of 16 or more: four convolutions with batch normalisation."""
    layers: list[nn.Module] = []
    before = 3
    for channels in (32, 64, 128, 256):
        layers += [nn.Conv2d(before, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        before = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, num_classes))
