"""A byte-level language model of the Python standard library's own source files: real text on every machine."""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from orchestray.platform.data.in_order import InOrder
from orchestray.platform.data.tensors import to_tensor
from orchestray.platform.errors import DataError, TaskError
from orchestray.trainers.tasks.transformer import Block, Embedding, initialise

if TYPE_CHECKING:
    from torch import Tensor

    from orchestray.platform.task import Batch

VOCABULARY = 256
_VALIDATION_EVERY = 10
"""Every tenth file, or the last of fewer files, is for validation: the model is not trained on any part of it."""


class PythonSource:
    """Predicts the next byte of Python source by a causal transformer, or by a recurrent network.

    A sample is `context` + 1 bytes. Samples do not overlap; with streams the last byte of one is the first of the next.

    Args:
        context: number of previous bytes that a transformer sees, and the length of a sample.
        width: width of the residual stream, a multiple of `heads`; or of the recurrent layers.
        depth: number of transformer blocks, or of recurrent layers.
        heads: number of attention heads per block.
        num_files: number of source files to read, in alphabetical order.
        dropout: probability of dropping a unit while training.
        model: "transformer", or a recurrent cell: "elman", "lstm" or "gru".
        bptt: number of time steps after which gradients of a recurrent model end; None: all those of a sample.
        streams: number of streams of text in which a recurrent model's state goes on; None: it does not go on.
    """

    lower_is_better = ("bits_per_byte",)

    def __init__(
        self,
        context: int = 64,
        width: int = 128,
        depth: int = 2,
        heads: int = 4,
        num_files: int = 64,
        dropout: float = 0.0,
        model: str = "transformer",
        bptt: int | None = None,
        streams: int | None = None,
    ) -> None:
        if model == "transformer" and width % heads:
            raise TaskError(f"task.heads must divide width ({width}) evenly, got {heads}")
        self._context = context
        self._width = width
        self._depth = depth
        self._heads = heads
        self._num_files = num_files
        self._dropout = dropout
        self._model, self._bptt, self._streams = model, bptt, streams

    def build_model(self) -> nn.Module:
        """Return a network from bytes [samples, time] (int64) to logits [samples, time, 256].

        A transformer is a flat sequence that can be cut anywhere.
        """
        if self._model != "transformer":
            from orchestray.trainers.tasks.recurrent import RecurrentModel

            return RecurrentModel(
                self._model,
                vocabulary=VOCABULARY,
                width=self._width,
                depth=self._depth,
                dropout=self._dropout,
                streams=self._streams,
                bptt=self._bptt,
            )
        model = nn.Sequential(
            Embedding(VOCABULARY, self._context, self._width, self._dropout),
            *(Block(self._width, self._heads, self._dropout) for _ in range(self._depth)),
            nn.LayerNorm(self._width),
            nn.Linear(self._width, VOCABULARY, bias=False),
        )
        initialise(model, self._depth)
        return model

    def dataset(self, split: str) -> pa.Table | InOrder:
        """Return the column `bytes`, with `context` + 1 uint8 per row.

        With streams, training data also has the columns `stream` and `begins`: row s * streams + k is sample s of
        stream k.
        """
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[: self._num_files]
        held_out = set(files[_VALIDATION_EVERY - 1 :: _VALIDATION_EVERY] or files[-1:])
        chosen = [file for file in files if (file in held_out) == (split == "validation")]
        text = b"".join(file.read_bytes() for file in chosen)
        size = self._context + 1
        if len(text) < size:
            raise DataError(
                f"the {split} data of python_source has {len(text)} bytes, too few for one sample of {size}: use more "
                "files (task.num_files) or a shorter task.context"
            )
        if self._streams is not None and split == "train":
            return InOrder(_in_streams(np.frombuffer(text, dtype=np.uint8), self._streams, self._context))
        values = pa.array(np.frombuffer(text, dtype=np.uint8)[: len(text) // size * size])
        return pa.table({"bytes": pa.FixedSizeListArray.from_arrays(values, size)})

    def to_batch(self, columns: pa.Table) -> Batch:
        """Return `inputs` and `targets` [samples, context], int64; a target is the byte that follows.

        Inputs of samples in streams are a tuple: the bytes, the stream of each sample, and if it begins there.
        """
        values = to_tensor(columns["bytes"], "bytes")
        inputs, targets = values[:, :-1].to(torch.int64), values[:, 1:].to(torch.int64)
        if "stream" not in columns.column_names:
            return {"inputs": inputs, "targets": targets}
        begins = to_tensor(columns["begins"], "begins").to(torch.bool)
        return {"inputs": (inputs, to_tensor(columns["stream"], "stream"), begins), "targets": targets}

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), batch["targets"].flatten())

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the accuracy of the next byte, and the cross-entropy in bits per byte."""
        return {
            "accuracy": (outputs.argmax(dim=-1) == batch["targets"]).to(torch.float32).mean(),
            "bits_per_byte": self.loss(outputs, batch) / math.log(2),
        }

    def example_inputs(self) -> Tensor:
        """Return the beginning of a program."""
        text = b'"""A module."""\n\nimport os\n'.ljust(self._context)[: self._context]
        return torch.tensor(list(text), dtype=torch.int64)


def _in_streams(text: np.ndarray, streams: int, context: int) -> pa.Table:
    """Return the samples of a text that is cut into streams of equal lengths, in the order in which they are used.

    Raises:
        DataError: the text is too short.
    """
    samples = (len(text) - 1) // streams // context
    if not samples:
        raise DataError(
            f"the train data of python_source has {len(text)} bytes, too few for a sample of {context + 1} in each of "
            f"{streams} streams: use more files (task.num_files), fewer streams or a shorter task.context"
        )
    number, stream = (each.ravel() for each in np.indices((samples, streams)))
    starts = (stream * samples + number) * context
    values = pa.array(text[starts[:, None] + np.arange(context + 1)].ravel())
    columns = {"bytes": pa.FixedSizeListArray.from_arrays(values, context + 1), "stream": stream, "begins": number == 0}
    return pa.table(columns)
