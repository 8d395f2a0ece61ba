"""The modules of a decoder-only transformer; a pipeline may cut after each.

Vaswani et al., "Attention Is All You Need", 2017; normalisation before each part and small initial weights follow
Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

_STD = 0.02


class Embedding(nn.Module):
    """An embedding of tokens [samples, time] as vectors [samples, time, width], with learned positions."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.dropout(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])
        return embedded


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer of four times the width, each with a residual connection."""

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
        # One module per use: a module is seeded by its name, and would drop the same units at both calls.
        self.attention_dropout = nn.Dropout(dropout)
        self.attention_output_dropout = nn.Dropout(dropout)
        self.feed_forward_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_output_dropout(self.attention_output(self._attend(self.attention_norm(x))))
        hidden = nn.functional.gelu(self.feed_forward_input(self.feed_forward_norm(x)))
        output: Tensor = x + self.feed_forward_dropout(self.feed_forward_output(hidden))
        return output

    def _attend(self, x: Tensor) -> Tensor:
        # Shapes come from the layers' outputs: split over workers they have fewer heads, and may have more time steps.
        projected = self.query_key_value(x)
        samples, time, _ = projected.shape
        parts = projected.view(samples, time, 3, self.heads, self.head_width)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        if self.training and self.attention_dropout.p > 0:
            # torch's attention draws by itself; a dropout module draws numbers that depend only on its name.
            scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
            future = torch.ones(time, time, dtype=torch.bool, device=x.device).triu(1)
            weights = self.attention_dropout(scores.masked_fill(future, -math.inf).softmax(dim=-1))
            mixed: Tensor = weights @ value
        else:
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(samples, time, self.heads * self.head_width)


def initialise(model: nn.Module, depth: int) -> None:
    """Draw normal weights of standard deviation 0.02, in place.

    Weights of layers that write to the residual stream have 1/sqrt(2 depth) of that.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue  # biases and norms keep their zeros and ones
        residual = name.endswith(("attention_output.weight", "feed_forward_output.weight"))
        nn.init.normal_(parameter, std=_STD / math.sqrt(2 * depth) if residual else _STD)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            torch.nn.init.zeros_(module.bias)
