"""The `task` section: the task to train. A built-in task's arguments are checked here, before its code is imported."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from orchestray.platform.config.base import BelowOne, Flag, Fraction, Positive, Section, Text


class TaskConfig(Section):
    """A task: its type, and all other keys as arguments of its constructor.

    A user's task ("package.module:Class", "path/to/file.py:Class") is an instance of this class. Each built-in task has
    a subclass with its arguments.
    """

    model_config = ConfigDict(extra="allow")

    type: Text
    """Built-in name, "package.module:Class", or "path/to/file.py:Class"."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the task's constructor: every key but `type`."""
        return {key: value for key, value in self.model_dump(mode="json").items() if key != "type"}

    @property
    def metric_names(self) -> tuple[str, ...] | None:
        """Metrics of a validation besides the loss, if the config determines them; None: the task does."""
        return None


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


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
    """Fraction of the images for validation."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        return ("accuracy",)


class PythonSourceTask(TaskConfig):
    """A byte-level language model on the Python standard library's own source files."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["python_source"]
    """The built-in task `python_source`."""
    model: Literal["transformer", "elman", "lstm", "gru"] = "transformer"
    """The network: a transformer, or recurrent layers."""
    context: Positive = 64
    """Number of bytes of a sample: those that a transformer sees."""
    width: Positive = 128
    """Width of the residual stream, a multiple of `heads`; or of a recurrent layer."""
    depth: Positive = 2
    """Number of transformer blocks, or of recurrent layers."""
    heads: Positive = 4
    """Number of attention heads per block."""
    bptt: Positive | None = None
    """Number of time steps after which a recurrent model's gradients end; null: all those of a sample."""
    streams: Positive | None = None
    """Number of streams that the text is cut into, as many as `train.batch_size`; in each of them a recurrent model's
    state goes on from batch to batch. null: every sample begins afresh, and samples are shuffled."""
    num_files: Positive = 64
    """Number of source files to read, in alphabetical order."""
    dropout: BelowOne = 0.0
    """Probability of dropping a unit while training."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        return ("accuracy", "bits_per_byte")


class HuggingFaceTask(TaskConfig):
    """A model of Hugging Face's `transformers` on a Parquet table of texts or of token ids."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["huggingface"]
    """The built-in task `huggingface`."""
    model: Text | dict[str, Any]
    """Folder of a model (its weights are where the run starts), or a configuration with fresh weights:
    `{model_type: bert, hidden_size: 64}`."""
    path: Text
    """File, directory or pyarrow.fs URI of the training table."""
    kind: Literal["sequence_classification", "causal_lm", "masked_lm"] = "sequence_classification"
    """The model's head and loss."""
    text: Annotated[tuple[Text, ...], BeforeValidator(_as_list)] = ("text",)
    """Column of texts, or two for pairs; or `input_ids`, a column of lists of token ids."""
    label: Text = "label"
    """Column to predict by `sequence_classification`: classes, or floating-point numbers."""
    tokenizer: Text | None = None
    """Folder of the tokenizer; null: that of the model."""
    max_length: Positive = 128
    """Largest number of tokens of a sample; longer texts are cut."""
    packing: Flag = False
    """Samples of `max_length` tokens cut from all texts joined, for `causal_lm`."""
    group_by_length: Flag = False
    """Batches of texts that are about as long as each other, so that little is padded."""
    mask_probability: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Fraction of the tokens that `masked_lm` predicts, other ones in every epoch."""
    lora: dict[str, Any] | None = None
    """Arguments of `peft.LoraConfig`: the adapter alone is trained; null: the model is."""
    freeze: Annotated[tuple[Text, ...], BeforeValidator(_as_list)] = ()
    """Patterns of names of parameters that are not trained."""
    validation_path: Text | None = None
    """Table to validate on; null: `validation_fraction` of the training table's rows."""
    validation_fraction: Fraction = 0.1
    """Fraction of the rows for validation if `validation_path` is null."""

    @property
    def metric_names(self) -> tuple[str, ...] | None:
        return None if self.kind == "sequence_classification" else ("perplexity", "accuracy")


class ParquetTask(TaskConfig):
    """A user's table, as Parquet on any filesystem: classification or regression by a fully connected network."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["parquet"]
    """The built-in task `parquet`."""
    path: Text
    """File, directory or pyarrow.fs URI of the training table."""
    label: Text
    """Column to predict."""
    features: Annotated[tuple[Text, ...], BeforeValidator(_as_list)] | None = None
    """Columns to predict from; null: all numeric columns but the label and the index of a pandas frame."""
    hidden: tuple[Positive, ...] = (64, 64)
    """Widths of the hidden layers."""
    kind: Literal["classification", "regression"] = "classification"
    """Prediction of a class (integers or text), or of a number."""
    validation_path: Text | None = None
    """Table to validate on; null: `validation_fraction` of the training table's rows."""
    validation_fraction: Fraction = 0.1
    """Fraction of the rows for validation if `validation_path` is null."""
    num_classes: Annotated[int, Field(strict=True, ge=2)] | None = None
    """Number of classes; null: counted in the training table."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        return ("accuracy",) if self.kind == "classification" else ("absolute_error",)


class ImagesTask(TaskConfig):
    """A user's images: a folder with a folder for each class, or a Parquet column of encoded images."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["images"]
    """The built-in task `images`."""
    path: Text
    """Folder with a folder for each class; or file, directory or pyarrow.fs URI of a Parquet table."""
    size: Annotated[int, Field(strict=True, ge=16)] = 64
    """Side of the square to which each image is cut and resized."""
    model: Text = "cnn"
    """The network: `cnn`, or the name of a network of torchvision for classification, as `resnet18`."""
    change: Flag = True
    """True to train on random parts of the images, every other one mirrored."""
    image: Text = "image"
    """Column of a table with the encoded images."""
    label: Text = "label"
    """Column of a table with the class."""
    validation_path: Text | None = None
    """Images to validate on; null: `validation_fraction` of the others."""
    validation_fraction: Fraction = 0.1
    """Fraction of the images for validation if `validation_path` is null."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        return ("accuracy",)


class MnistTask(TaskConfig):
    """Grey images in the files of MNIST's format (IDX)."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["mnist"]
    """The built-in task `mnist`."""
    path: Text
    """Folder with `train-images-idx3-ubyte`, `train-labels-idx1-ubyte` and those of `t10k`; each may end in `.gz`."""
    model: Literal["mlp", "cnn"] = "mlp"
    """The network: fully connected, or convolutions with pooling."""
    hidden: tuple[Positive, ...] = (128, 128)
    """Widths of the hidden layers (mlp), or channels of the convolutions (cnn)."""
    checksums: dict[str, Text] | None = None
    """SHA-256 of files, by their names; null: none is checked."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        return ("accuracy",)
