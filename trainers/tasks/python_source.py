"""`python_source`: a byte-level language model of the Python standard library's own source files."""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from orchestray.platform.data.tensors import to_tensor
from orchestray.platform.errors import DataError

_VOCABULARY = 256
_VALIDATION_PART = 10
"""Every tenth file is for validation."""


class PythonSource:
    """Predict the next byte of Python source.

    Args:
        context: bytes the model sees; a sample is `context + 1` bytes, and samples do not overlap.
        width: of the transformer's residual stream.
        depth: number of blocks.
        heads: attention heads a block.
        num_files: how many files of the library are used, the first in alphabetical order.
        dropout: probability, in every block.
    """

    def __init__(
        self,
        context: int = 64,
        width: int = 128,
        depth: int = 2,
        heads: int = 4,
        num_files: int = 64,
        dropout: float = 0.0,
    ) -> None:
        self._context, self._width, self._depth, self._heads = context, width, depth, heads
        self._num_files = num_files
        self._dropout = dropout

    def build_model(self) -> nn.Module:
        blocks = [Block(self._width, self._heads, self._dropout) for _ in range(self._depth)]
        return nn.Sequential(
            Embedding(self._context, self._width),
            *blocks,
            nn.LayerNorm(self._width),
            nn.Linear(self._width, _VOCABULARY),
        )

    def dataset(self, split: str) -> pa.Table:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[: self._num_files]
        validating = split == "validation"
        chosen = [file for number, file in enumerate(files) if (number % _VALIDATION_PART == 0) == validating]
        text = b"".join(file.read_bytes() for file in chosen)
        size = self._context + 1
        if len(text) < size:
            raise DataError(
                f"The {split} split of python_source has {len(text)} bytes, fewer than one sample of {size}: "
                "use more files (task.num_files) or a shorter task.context."
            )
        values = np.frombuffer(text, dtype=np.uint8)[: len(text) // size * size]
        return pa.table({"bytes": pa.FixedSizeListArray.from_arrays(pa.array(values), size)})

    def to_batch(self, columns: pa.Table) -> dict[str, Tensor]:
        values = to_tensor(columns["bytes"], "bytes").to(torch.int64)
        return {"inputs": values[:, :-1].contiguous(), "targets": values[:, 1:].contiguous()}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), batch["targets"].flatten())

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            "accuracy": (outputs.argmax(dim=-1) == batch["targets"]).to(torch.float32).mean(),
            "bits_per_byte": self.loss(outputs, batch) / math.log(2),
        }

    def example_inputs(self) -> Tensor:
        return torch.zeros(self._context, dtype=torch.int64)


class Embedding(nn.Module):
    """Bytes `[batch, time]` to vectors `[batch, time, width]`, with learned positions."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(_VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(context, width) * 0.02)

    def forward(self, values: Tensor) -> Tensor:
        embedded: Tensor = self.bytes(values)
        return embedded + self.positions[: values.shape[1]]


class Block(nn.Module):
    """A pre-norm transformer block with causal attention (Vaswani et al. 2017; Xiong et al. 2020, figure 1b)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self._attend(self.attention_norm(x)))
        output: Tensor = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return output

    def _attend(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = self.query_key_value(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        output: Tensor = self.attention_output(attended.transpose(1, 2).reshape(batch, time, width))
        return output
