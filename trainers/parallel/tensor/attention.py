"""Attention split by heads (Shoeybi et al., "Megatron-LM", 2019, section 3): each worker attends with its own heads.

The projections of query, key and value are split by their output features, head by head; the output projection by its
input features. This takes one all-reduce forward and one backward. `nn.MultiheadAttention` gets another forward, since
its own reads its parameters' shapes; a user's block keeps its own, with fewer heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.platform.errors import ConfigError
from orchestray.trainers.parallel.tensor.attention_blocks import split_block
from orchestray.trainers.parallel.tensor.base import Cut
from orchestray.trainers.parallel.tensor.dropout import drop_part
from orchestray.trainers.parallel.tensor.functions import add_up, add_up_parts, gather
from orchestray.trainers.parallel.tensor.linear import Entrance
from orchestray.trainers.parallel.tensor.parts import (
    SplitModule,
    become,
    bounds,
    check_plain,
    joined,
    keep,
    scaled,
    shown,
)

if TYPE_CHECKING:
    from orchestray.trainers.parallel.tensor.base import Region, Split
    from orchestray.trainers.parallel.tensor.functions import GroupRef


def split_heads(module: nn.Module, name: str, split: Split) -> None:
    """Split an attention block by heads: `nn.MultiheadAttention`, or a module with
    projections and a number of heads.
    """
    if isinstance(module, nn.MultiheadAttention):
        _split_multihead(module, name, split)
    else:
        split_block(module, name, split)


def _split_multihead(module: nn.MultiheadAttention, name: str, split: Split) -> None:
    _check_multihead(module, name)
    ranges = bounds(name, "heads", module.num_heads, split)
    width, own = module.embed_dim, scaled([ranges[split.rank]], module.head_dim)[0]
    thirds = [(own[0] + third * width, own[1] + third * width) for third in range(3)]
    for tensor in ("in_proj_weight", "in_proj_bias"):
        keep(module, name, split, tensor, 0, *thirds)
    for tensor in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        keep(module, name, split, tensor, 0, own)
    keep(module.out_proj, joined(name, "out_proj"), split, "weight", 1, own)
    module.out_proj.in_features = own[1] - own[0]
    made = become(module, _Heads)
    made.region = split.region_of(name)
    made.group, made.split_rank = split.group, split.rank
    made.cut = Cut(1, tuple(stop - start for start, stop in ranges))
    made.entrance = Entrance(split.group, made.region)
    made.num_heads = ranges[split.rank][1] - ranges[split.rank][0]
    made._qkv_same_embed_dim = False  # tells nn.TransformerEncoderLayer not to read the weights past this module


def _check_multihead(module: nn.MultiheadAttention, name: str) -> None:
    check_plain(module, name, "heads", nn.MultiheadAttention)
    if module.bias_k is not None or module.add_zero_attn:
        raise ConfigError(
            f"{shown(name)} cannot be split by heads with add_bias_kv or add_zero_attn. Leave it out of the plan."
        )


class _Heads(SplitModule):
    """The heads of one worker; arguments and results are those of `nn.MultiheadAttention`."""

    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    q_proj_weight: Tensor
    k_proj_weight: Tensor
    v_proj_weight: Tensor
    out_proj: nn.Linear
    dropout: float
    batch_first: bool
    head_dim: int
    num_heads: int
    """Number of this worker's heads."""
    _qkv_same_embed_dim: bool
    group: GroupRef
    split_rank: int
    region: Region | None
    cut: Cut
    """Cut of the attention weights [samples, heads, targets, sources]."""
    entrance: Entrance

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise RuntimeError("nn.MultiheadAttention needs attn_mask with the hint is_causal.")
        is_batched = query.dim() == 3
        q, k, v = (
            part.view(*part.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
            for part in self._projected(query, key, value)
        )
        dropping = self.training and self.dropout > 0
        weights = None
        if need_weights or dropping:
            mask = self._mask(q, k, attn_mask, key_padding_mask)
            scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
            weights = (scores if mask is None else scores + mask).softmax(dim=-1)
            if dropping:
                weights = drop_part(weights, self.cut, self.split_rank, self._draw)
            mixed = weights @ v
        else:
            is_causal = is_causal and key_padding_mask is None
            mask = None if is_causal else self._mask(q, k, attn_mask, key_padding_mask)
            mixed = functional.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal)
        output = self._output(mixed, is_batched)
        shared = self._shared(weights, average_attn_weights) if need_weights and weights is not None else None
        return output, shared if is_batched or shared is None else shared.squeeze(0)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return queries, keys and values of this worker's heads, [samples, time, features] each."""
        given = (query, key, value)
        entered: dict[int, Tensor] = {}
        for x in given:
            if id(x) not in entered:
                entered[id(x)] = self._laid_out(self.entrance(x))
        if self.in_proj_weight is not None and query is key is value:
            packed = functional.linear(entered[id(query)], self.in_proj_weight, self.in_proj_bias)
            return list(packed.chunk(3, -1))
        weights = (
            (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            if self.in_proj_weight is None
            else self.in_proj_weight.chunk(3)
        )
        biases: Any = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [
            functional.linear(entered[id(x)], weight, bias)
            for x, weight, bias in zip(given, weights, biases, strict=True)
        ]

    def _laid_out(self, x: Tensor) -> Tensor:
        """Return `x` as [samples, time, features]."""
        if x.dim() == 2:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _output(self, mixed: Tensor, is_batched: bool) -> Tensor:
        """Return the whole output from the heads' results [samples, heads, time, features].

        Time comes first in memory, as in torch's output: a dropout that follows draws in the order of the memory.
        """
        term = functional.linear(mixed.permute(2, 0, 1, 3).flatten(2), self.out_proj.weight)
        if self.region is None:
            output = add_up(term, self.group)
        else:
            output = add_up_parts(term, self.group, 0, self.region.sizes)
        bias = cast(Tensor | None, self.out_proj.bias)
        output = output if bias is None else output + bias.to(output.dtype)
        if not is_batched:
            return output.squeeze(1)
        return output.transpose(0, 1) if self.batch_first else output

    def _mask(self, q: Tensor, k: Tensor, attention: Tensor | None, padding: Tensor | None) -> Tensor | None:
        """Return the mask to add to the scores, broadcastable to [samples, heads, targets, sources]."""
        added = None
        if attention is not None:
            added = _added(attention, q.dtype)
            if added.dim() == 3:  # a mask for every head of every sample
                every = added.view(q.shape[0], sum(self.cut.sizes), *added.shape[1:])
                added = every.narrow(1, sum(self.cut.sizes[: self.split_rank]), self.num_heads)
        if padding is not None:
            added_padding = _added(padding, q.dtype).view(q.shape[0], 1, 1, k.shape[2])
            added = added_padding if added is None else added + added_padding
        return added

    def _draw(self, ones: Tensor) -> Tensor:
        return functional.dropout(ones, self.dropout, training=True)

    def _shared(self, weights: Tensor, average: bool) -> Tensor:
        """Return the attention weights of all heads, or their mean."""
        if not average:
            return gather(weights, self.group, 1, self.cut.sizes)
        return add_up(weights.sum(dim=1), self.group) / sum(self.cut.sizes)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask to add: a boolean one hides where it is true."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, float("-inf"))
