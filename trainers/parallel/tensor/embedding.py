"""Embeddings split by the rows of their table (Shoeybi et al., "Megatron-LM", 2019, section 3).

A worker looks up the indices of its rows, and zeros for the others; the sum over the workers is the embedding. A table
that is also the weight of the output layer (tied) can be split if that layer is split by its output features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional

from orchestray.platform.errors import ConfigError
from orchestray.trainers.parallel.tensor.functions import add_up
from orchestray.trainers.parallel.tensor.parts import SplitModule, become, bounds, check_plain, keep, shown

if TYPE_CHECKING:
    from orchestray.trainers.parallel.tensor.base import Split
    from orchestray.trainers.parallel.tensor.functions import GroupRef


class _Vocabulary(SplitModule):
    weight: Tensor
    group: GroupRef
    start: int
    """Index of the first row this worker holds."""
    num_rows: int
    """Number of rows of the whole table."""
    padding_row: int | None
    """Index, among this worker's rows, of the one that gets no gradient."""

    def forward(self, indices: Tensor) -> Tensor:
        if indices.device.type == "cpu" and indices.numel() and not 0 <= indices.min() <= indices.max() < self.num_rows:
            raise IndexError(f"index out of range: the table has {self.num_rows} rows")
        rows = indices - self.start
        elsewhere = (rows < 0) | (rows >= self.weight.shape[0])
        found = functional.embedding(rows.masked_fill(elsewhere, 0), self.weight, self.padding_row)
        return add_up(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.group)


def split_vocabulary(module: nn.Module, name: str, split: Split) -> None:
    """Split the table by rows; the output is whole. Sends, forward, the bytes of an all-reduce of the output."""
    check_plain(module, name, "embedding", nn.Embedding)
    assert isinstance(module, nn.Embedding)
    if split.region_of(name) is not None:
        raise ConfigError(
            f"{shown(name)} has the style 'embedding' within a part split along the time (style 'sequence'); begin "
            "that part after it."
        )
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise ConfigError(f"{shown(name)} cannot be split with the option {option}. Leave it out of the plan.")
    start, stop = bounds(name, "rows", module.num_embeddings, split)[split.rank]
    keep(module, name, split, "weight", 0, (start, stop))
    padding, module.padding_idx = module.padding_idx, None
    num_rows, module.num_embeddings = module.num_embeddings, stop - start
    made = become(module, _Vocabulary)
    made.group, made.start, made.num_rows = split.group, start, num_rows
    made.padding_row = padding - start if padding is not None and start <= padding < stop else None
