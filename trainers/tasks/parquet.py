"""A task for a user's table: one column is predicted from others by a fully connected network."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import torch
from torch import nn

from orchestray.platform.data.retries import read_patiently
from orchestray.platform.data.tensors import stack_columns, to_tensor
from orchestray.platform.errors import DataError, TaskError
from orchestray.trainers.tasks.classification import accuracy, cross_entropy
from orchestray.trainers.tasks.layers import multilayer_perceptron
from orchestray.trainers.tasks.parquet_files import check_columns, class_indices, open_files, part

if TYPE_CHECKING:
    from torch import Tensor

    from orchestray.platform.task import Batch


class ParquetTable:
    """Classification or regression on Parquet files on any filesystem; data larger than memory is streamed.

    Args:
        path: file, directory or `pyarrow.fs` URI of the training table.
        label: column to predict: whole numbers or text for classes, a number for regression.
        features: columns to predict from, numbers or equally long lists of numbers; None: all of them but the label
        and the index of a pandas frame. They are converted to float32 without scaling.
        hidden: widths of the hidden layers.
        kind: "classification" or "regression".
        validation_path: table to validate on; None: a part of the training table, drawn by `parquet_files.part`.
        validation_fraction: fraction of the training table in that part.
        num_classes: number of classes, if whole numbers below it are the classes themselves; None: the classes are the
        sorted values of the training rows.
        classes: values of the classes, if already known.
        num_inputs: number of values in the features of a row, if already known.

    With `features`, `classes` and `num_inputs` the model is built without the data (`rebuild_arguments`).
    """

    lower_is_better = ("absolute_error",)

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
        classes: Sequence[Any] | None = None,
        num_inputs: int | None = None,
    ) -> None:
        if kind not in {"classification", "regression"}:
            raise TaskError(f"task.kind must be 'classification' or 'regression', got {kind!r}")
        self._path = path
        self._label = label
        wanted = [features] if isinstance(features, str) else features
        self._wanted = None if wanted is None else list(wanted)
        self._hidden = list(hidden)
        self._classifies = kind == "classification"
        self._validation_path = validation_path
        self._validation_fraction = validation_fraction
        self._num_classes = num_classes
        self._known_classes = classes
        self._known_inputs = num_inputs

    def build_model(self) -> nn.Module:
        """Return a network from [samples, num_inputs] to a logit per class, or to one number."""
        return multilayer_perceptron(self.num_inputs, self._hidden, self._num_outputs)

    def dataset(self, split: str) -> pa.Table | ds.Dataset:
        """Return the features and the label of a split.

        Raises:
            TaskError: a file or a column is missing, or has a type that cannot be used.
            DataError: a file is damaged.
        """
        validation = split == "validation"
        columns = [*self.features, self._label]
        if self._validation_path is None:
            return part(self._data, self._path, columns, self._validation_fraction, validation=validation)
        data = open_files(self._validation_path, "task.validation_path") if validation else self._data
        check_columns(columns, data.schema, self._validation_path if validation else self._path)
        return data.replace_schema(pa.schema([data.schema.field(name) for name in columns]))

    def to_batch(self, columns: pa.Table) -> Batch:
        """Return `inputs` [samples, num_inputs] float32 and `targets` [samples], classes (int64) or float32 numbers."""
        inputs = stack_columns(columns, self.features)
        label = columns[self._label]
        if not self._classifies:
            return {"inputs": inputs, "targets": to_tensor(label, self._label).to(torch.float32)}
        return {"inputs": inputs, "targets": class_indices(label, self.classes, self._label)}

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the cross-entropy, or the mean squared error for regression."""
        if self._classifies:
            return cross_entropy(outputs, batch)
        return nn.functional.mse_loss(outputs.squeeze(1), batch["targets"])

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        if self._classifies:
            return {"accuracy": accuracy(outputs, batch)}
        return {"absolute_error": (outputs.squeeze(1) - batch["targets"]).abs().mean()}

    def example_inputs(self) -> Tensor:
        """Return the features of one row, all zero."""
        return torch.zeros(self.num_inputs)

    def rebuild_arguments(self) -> dict[str, Any]:
        """Return additional arguments with which the same model is built without the data."""
        found: dict[str, Any] = {"features": self.features, "num_inputs": self.num_inputs}
        return {**found, "classes": self.classes} if self._classifies else found

    @cached_property
    def feature_names(self) -> dict[str, int]:
        """Number of values of each feature; empty for lists, if the model was built without the data."""
        if self.num_inputs == len(self.features):
            return dict.fromkeys(self.features, 1)
        if self._known_inputs is not None:
            return {}
        return {name: stack_columns(self._first, [name]).shape[1] for name in self.features}

    @property
    def class_names(self) -> list[Any]:
        """Values of the label, in the order of the outputs; empty for a regression."""
        return self.classes if self._classifies else []

    @cached_property
    def features(self) -> list[str]:
        """Columns that are predicted from, in order."""
        if self._wanted is not None and self._known_inputs is not None:
            return self._wanted
        schema = self._data.schema
        check_columns([self._label, *(self._wanted or [])], schema, self._path)
        _check_label(schema.field(self._label), self._classifies)
        if self._wanted is None:
            left_out = {self._label, *_index_columns(schema)}
            found = [field.name for field in schema if field.name not in left_out and _is_number(field.type)]
            if not found:
                raise TaskError(
                    f"{self._path} has no column of numbers beside the label '{self._label}' to predict from"
                )
            return found
        for name in self._wanted:
            if name == self._label:
                raise TaskError(f"task.features: '{name}' is the label; it cannot be predicted from itself")
            if not _is_number(schema.field(name).type):
                raise TaskError(
                    f"task.features: column '{name}' of {self._path} is of type {schema.field(name).type}; wanted "
                    "numbers. Leave it out or write it as numbers."
                )
        return self._wanted

    @cached_property
    def num_inputs(self) -> int:
        """Number of values in the features of a row."""
        if self._known_inputs is not None:
            return self._known_inputs
        return stack_columns(self._first, self.features).shape[1]

    @cached_property
    def classes(self) -> list[Any]:
        """Label values of the classes."""
        if self._known_classes is not None:
            return list(self._known_classes)
        kind = self._data.schema.field(self._label).type
        if self._num_classes is not None and not _is_text(kind):
            return list(range(self._num_classes))
        found = sorted(self._label_values())
        if self._num_classes is None:
            if len(found) < 2:
                raise DataError(
                    f"the label '{self._label}' of {self._path} has no two values: there is nothing to learn"
                )
        elif len(found) > self._num_classes:
            raise TaskError(
                f"task.num_classes is {self._num_classes}, but the label '{self._label}' has {len(found)} values: "
                f"{', '.join(map(repr, found[:5]))}, ..."
            )
        return found

    @property
    def _num_outputs(self) -> int:
        if not self._classifies:
            return 1
        return max(self._num_classes or 0, len(self.classes))

    @property
    def _first(self) -> pa.Table:
        return read_patiently(lambda: self._data.head(1, columns=self.features), self._path)

    @cached_property
    def _data(self) -> ds.FileSystemDataset:
        return open_files(self._path, "task.path")

    def _label_values(self) -> set[Any]:
        """Return the label values of all rows: a class may be in the part that is held out for validation alone."""
        self.features  # noqa: B018 - checks the columns

        def read() -> set[Any]:
            values: set[Any] = set()
            for batch in self._data.to_batches(columns=[self._label]):
                values.update(pc.unique(batch.column(0)).drop_null().to_pylist())
            return values

        return read_patiently(read, self._path)


def _check_label(field: pa.Field, classifies: bool) -> None:
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    whole = pa.types.is_integer(kind) or pa.types.is_boolean(kind)
    if classifies and not (whole or _is_text(kind)):
        raise TaskError(
            f"task.label: column '{field.name}' is of type {field.type}; classes are whole numbers or text. "
            "For a number to predict set task.kind=regression."
        )
    if not classifies and not (whole or pa.types.is_floating(kind)):
        raise TaskError(
            f"task.label: column '{field.name}' is of type {field.type}; regression predicts a number. "
            "For classes set task.kind=classification."
        )


def _index_columns(schema: pa.Schema) -> list[str]:
    """Return the columns in which pandas has kept the index of a frame: the numbers of its rows, or their names."""
    columns = (schema.pandas_metadata or {}).get("index_columns", [])
    return [name for name in columns if isinstance(name, str)]


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_number(kind: pa.DataType) -> bool:
    """Return True if a column of this type can be converted to numbers: numbers, booleans, or lists of them."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return True
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _is_number(kind.value_type)
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))
