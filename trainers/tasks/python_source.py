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
    """Predicts the next byte of Python source by a causal transformer.

    A sample is `context` + 1 bytes; samples do not overlap.

    Args:
        context: number of previous bytes that the model sees.
        width: width of the residual stream; a multiple of `heads`.
        depth: number of transformer blocks.
        heads: number of attention heads per block.
        num_files: number of source files to read, in alphabetical order.
        dropout: probability of dropping a unit while training.
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
    ) -> None:
        if width % heads:
            raise TaskError(f"task.heads must divide width ({width}) evenly, got {heads}")
        self._context = context
        self._width = width
        self._depth = depth
        self._heads = heads
        self._num_files = num_files
        self._dropout = dropout

    def build_model(self) -> nn.Module:
        """Return a network from bytes [samples, time] (int64) to logits [samples, time, 256].

        It is a flat sequence that can be cut anywhere.
        """
        model = nn.Sequential(
            Embedding(VOCABULARY, self._context, self._width, self._dropout),
            *(Block(self._width, self._heads, self._dropout) for _ in range(self._depth)),
            nn.LayerNorm(self._width),
            nn.Linear(self._width, VOCABULARY, bias=False),
        )
        initialise(model, self._depth)
        return model

    def dataset(self, split: str) -> pa.Table:
        """Return the column `bytes`, with `context` + 1 uint8 per row."""
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
        values = pa.array(np.frombuffer(text, dtype=np.uint8)[: len(text) // size * size])
        return pa.table({"bytes": pa.FixedSizeListArray.from_arrays(values, size)})

    def to_batch(self, columns: pa.Table) -> Batch:
        """Return `inputs` and `targets` [samples, context], int64; a target is the byte that follows."""
        values = to_tensor(columns["bytes"], "bytes")
        return {"inputs": values[:, :-1].to(torch.int64), "targets": values[:, 1:].to(torch.int64)}

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
