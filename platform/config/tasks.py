"""The `task` section: what is learned. Each built-in task has its arguments checked here, before its code is loaded."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from orchestray.platform.config.base import BelowOne, Flag, Fraction, Positive, Section, Text


class TaskConfig(Section):
    """A task: its type, and everything else as arguments of its constructor.

    A task of one's own ("package.module:Class", "path/to/file.py:Class") is of this class itself; the built-in ones
    have a subclass each, which knows their arguments.
    """

    model_config = ConfigDict(extra="allow")

    type: Text
    """Built-in name, "package.module:Class", or "path/to/file.py:Class"."""

    @property
    def arguments(self) -> dict[str, Any]:
        """What the task's constructor is called with: every key but `type`."""
        return {key: value for key, value in self.model_dump(mode="json").items() if key != "type"}

    @property
    def metric_names(self) -> tuple[str, ...] | None:
        """What a validation reports beside the loss, where the config alone says so; null: the task knows."""
        return None


class DigitsTask(TaskConfig):
    """scikit-learn's bundled 8 x 8 images of handwritten digits: real data on every machine."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["digits"]
    """The built-in task `digits`."""
    hidden: tuple[Positive, ...] = (128, 128)
    """Widths of the hidden layers (mlp) or of those after the convolutions (alexnet); or channels of the convolutions
    (cnn) or of the blocks (inception)."""
    model: Literal["mlp", "cnn", "inception", "alexnet"] = "mlp"
    """The network: fully connected, convolutions with batch normalisation, blocks of four branches, or two towers of
    convolutions before fully connected layers."""
    batch_norm: Flag = False
    """Batch normalisation after each hidden layer of the mlp (the cnn always has it)."""
    dropout: BelowOne = 0.0
    """Probability of dropping a unit of a hidden layer while training."""
    validation_fraction: Fraction = 0.2
    """Part of the images kept for validation."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        return ("accuracy",)


class PythonSourceTask(TaskConfig):
    """A byte-level transformer language model on the Python standard library's own source files."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["python_source"]
    """The built-in task `python_source`."""
    context: Positive = 64
    """Bytes the model looks back at."""
    width: Positive = 128
    """Width of the residual stream; a multiple of `heads`."""
    depth: Positive = 2
    """Number of transformer blocks."""
    heads: Positive = 4
    """Attention heads of a block."""
    num_files: Positive = 64
    """Source files that are read, in alphabetical order."""
    dropout: BelowOne = 0.0
    """Probability of dropping a unit while training."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        return ("accuracy", "bits_per_byte")


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class ParquetTask(TaskConfig):
    """A table the user has, as Parquet on any filesystem: classification or regression by a fully connected network."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["parquet"]
    """The built-in task `parquet`."""
    path: Text
    """File, directory or pyarrow.fs URI of the training table."""
    label: Text
    """Column to predict."""
    features: Annotated[tuple[Text, ...], BeforeValidator(_as_list)] | None = None
    """Columns to predict from; null: all numeric columns but the label."""
    hidden: tuple[Positive, ...] = (64, 64)
    """Widths of the hidden layers."""
    kind: Literal["classification", "regression"] = "classification"
    """What is predicted: a class (integers or text), or a number."""
    validation_path: Text | None = None
    """Table to validate on; null: `validation_fraction` of the training table's rows."""
    validation_fraction: Fraction = 0.1
    """Part of the rows kept for validation where there is no `validation_path`."""
    num_classes: Annotated[int, Field(strict=True, ge=2)] | None = None
    """Number of classes; null: counted in the training table."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        return ("accuracy",) if self.kind == "classification" else ("absolute_error",)


BUILT_IN: dict[str, type[TaskConfig]] = {
    "digits": DigitsTask,
    "python_source": PythonSourceTask,
    "parquet": ParquetTask,
}
"""The built-in tasks by name."""

OWN = "own"
"""The tag of a task that is not built in."""


def _tag(value: object) -> str | None:
    """Which member of the union a value is meant for."""
    name = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if isinstance(name, str):
        return name if name in BUILT_IN else OWN
    return OWN


AnyTask = Annotated[
    Annotated[DigitsTask, Tag("digits")]
    | Annotated[PythonSourceTask, Tag("python_source")]
    | Annotated[ParquetTask, Tag("parquet")]
    | Annotated[TaskConfig, Tag(OWN)],
    Discriminator(_tag),
]
