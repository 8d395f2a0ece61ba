"""The pieces of a decoder-only transformer, each a module that a pipeline may cut after.

Vaswani et al., "Attention Is All You Need", 2017; normalisation before each part and small initial weights as in
Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

_STD = 0.02


class Embedding(nn.Module):
    """Tokens [samples, time] to vectors [samples, time, width], with learned positions."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.dropout(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])
        return embedded


class Block(nn.Module):
    """Causal self-attention, then a feed-forward layer of four times the width, each added to what came in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.head_width = width // heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward_input = nn.Linear(width, 4 * width)
        self.feed_forward_output = nn.Linear(4 * width, width)
        # A module a use: seeded by its name, one that is called twice would drop the same units twice.
        self.attention_dropout = nn.Dropout(dropout)
        self.attention_output_dropout = nn.Dropout(dropout)
        self.feed_forward_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_output_dropout(self.attention_output(self._attend(self.attention_norm(x))))
        hidden = nn.functional.gelu(self.feed_forward_input(self.feed_forward_norm(x)))
        output: Tensor = x + self.feed_forward_dropout(self.feed_forward_output(hidden))
        return output

    def _attend(self, x: Tensor) -> Tensor:
        # Shapes are those of what the layers give: split over workers they have fewer heads, and may have more time.
        projected = self.query_key_value(x)
        samples, time, _ = projected.shape
        parts = projected.view(samples, time, 3, self.heads, self.head_width)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        if self.training and self.attention_dropout.p > 0:
            # torch's attention would draw by itself; drawn by a module, what is dropped depends on its name alone.
            scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
            future = torch.ones(time, time, dtype=torch.bool, device=x.device).triu(1)
            weights = self.attention_dropout(scores.masked_fill(future, -math.inf).softmax(dim=-1))
            mixed: Tensor = weights @ value
        else:
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(samples, time, self.heads * self.head_width)


def initialise(model: nn.Module, depth: int) -> None:
    """Normal weights of standard deviation 0.02; those that write to the residual stream 1/sqrt(2 depth) of that."""
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue  # biases and norms keep their zeros and ones
        residual = name.endswith(("attention_output.weight", "feed_forward_output.weight"))
        nn.init.normal_(parameter, std=_STD / math.sqrt(2 * depth) if residual else _STD)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            torch.nn.init.zeros_(module.bias)
