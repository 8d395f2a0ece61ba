"""`parquet`: a table the user has, on any filesystem pyarrow knows."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs as pafs
import torch
from torch import Tensor, nn

from orchestray.platform.data.tensors import to_tensor
from orchestray.platform.errors import DataError, TaskError
from orchestray.trainers.tasks.layers import multilayer_perceptron


class ParquetTable:
    """Classification or regression of one column from others, by a multi-layer perceptron.

    Args:
        path: file, directory or URI.
        label: the column to predict; for `classification`, integers from 0, or strings.
        features: the columns to predict from; default: all numeric ones but the label.
        hidden: widths of the hidden layers.
        kind: `classification` or `regression`.
        validation_path: rows for validation; default: a part of the rows of `path`.
        validation_fraction: that part.
        num_classes: default: found in the labels.
    """

    def __init__(
        self,
        path: str,
        label: str,
        features: Sequence[str] | str | None = None,
        hidden: Sequence[int] = (64, 64),
        kind: str = "classification",
        validation_path: str | None = None,
        validation_fraction: float = 0.1,
        num_classes: int | None = None,
    ) -> None:
        self._path, self._validation_path = path, validation_path
        self._validation_fraction = validation_fraction
        self._hidden = list(hidden)
        self._classifies = kind == "classification"
        self._label = label
        self._data = _open(path)
        self._check_columns([label])
        self._features = self._choose(features)
        self._classes = self._find_classes(num_classes) if self._classifies else []

    def _choose(self, features: Sequence[str] | str | None) -> list[str]:
        if features is None:
            features = [f.name for f in self._data.schema if _is_number(f.type) and f.name != self._label]
        chosen = [features] if isinstance(features, str) else list(features)
        self._check_columns(chosen)
        wrong = [name for name in chosen if not _is_number(self._data.schema.field(name).type)]
        if wrong:
            raise TaskError(
                f"task.features: the column {wrong[0]!r} of {self._path} has the type "
                f"{self._data.schema.field(wrong[0]).type}; wanted numbers."
            )
        if not chosen:
            raise TaskError(f"task.features: {self._path} has no numeric column to learn from beside the label.")
        return chosen

    def _check_columns(self, names: Sequence[str]) -> None:
        known = self._data.schema.names
        for name in names:
            if name not in known:
                near = get_close_matches(name, known, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise TaskError(f"There is no column {name!r} in {self._path}; it has: {', '.join(known)}.{hint}")

    def _find_classes(self, num_classes: int | None) -> list[Any]:
        """The label's values in the order of their class numbers."""
        kind = self._data.schema.field(self._label).type
        if pa.types.is_integer(kind) and num_classes is not None:
            return list(range(num_classes))
        with _reading(self._path):
            values = pc.unique(self._data.to_table(columns=[self._label])[self._label]).drop_null().to_pylist()
        if pa.types.is_integer(kind):
            if values and min(values) < 0:
                raise DataError(f"The label {self._label!r} of {self._path} has negative classes; wanted 0, 1, 2, ...")
            return list(range(max(values, default=0) + 1))
        return sorted(values)

    def build_model(self) -> nn.Module:
        return multilayer_perceptron(len(self._features), self._hidden, len(self._classes) if self._classifies else 1)

    def dataset(self, split: str) -> pa.Table | ds.Dataset:
        columns = [*self._features, self._label]
        if self._validation_path is not None:
            return _open(self._validation_path if split == "validation" else self._path)
        with _reading(self._path):
            return self._part(split, columns)

    def _part(self, split: str, columns: list[str]) -> pa.Table:
        table = self._data.to_table(columns=columns)
        order = np.random.default_rng(0).permutation(table.num_rows)
        num_validation = round(table.num_rows * self._validation_fraction)
        # The rows stay in the file's order: the run shuffles them itself.
        chosen = np.sort(order[:num_validation] if split == "validation" else order[num_validation:])
        if len(chosen) == 0 and table.num_rows:
            chosen = np.arange(table.num_rows)  # too few rows to keep any apart
        return table.take(chosen)

    def to_batch(self, columns: pa.Table) -> dict[str, Tensor]:
        features = [to_tensor(columns[name], name).to(torch.float32) for name in self._features]
        label = columns[self._label]
        if not self._classifies:
            targets = to_tensor(label, self._label).to(torch.float32)
        elif pa.types.is_integer(label.type):
            targets = to_tensor(label, self._label).to(torch.int64)
        else:
            found = pc.index_in(label, value_set=pa.array(self._classes, label.type))
            if found.null_count:
                raise DataError(f"The label {self._label!r} has values that the training rows do not have.")
            targets = to_tensor(found, self._label).to(torch.int64)
        return {"inputs": torch.stack(features, dim=1), "targets": targets}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if self._classifies:
            return nn.functional.cross_entropy(outputs, batch["targets"])
        return nn.functional.mse_loss(outputs.squeeze(1), batch["targets"])

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._classifies:
            return {"accuracy": (outputs.argmax(dim=1) == batch["targets"]).to(torch.float32).mean()}
        return {"absolute_error": (outputs.squeeze(1) - batch["targets"]).abs().mean()}

    def example_inputs(self) -> Tensor:
        return torch.zeros(len(self._features))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _open(path: str) -> ds.Dataset:
    with _reading(path):
        if "://" in path:
            filesystem, inner = pafs.FileSystem.from_uri(path)
            return ds.dataset(inner, filesystem=filesystem, format="parquet")
        return ds.dataset(path, format="parquet")


class _reading:  # noqa: N801 - reads as a statement: with _reading(path)
    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, FileNotFoundError):
            raise TaskError(f"task.path: there is nothing at {self._path}.") from error
        if isinstance(error, (pa.ArrowException, OSError)):
            raise DataError(
                f"The data at {self._path} cannot be read: {str(error).splitlines()[0]} It may be truncated or no Parquet: "
                "check it or write it again."
            ) from error
