"""Sampling of the next token of each request from the model's logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from orchestray.serving.generation.sampling import Sampling


def pick(logits: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> list[int]:
    """Choose the next token of each request. A row's result depends on that row alone.

    Args:
        logits: [requests, vocabulary].
        samplings: sampling of each request.
        uniforms: a number from [0, 1) for each request, which decides the draw; unused if `temperature` is 0.

    Returns:
        a token per request.
    """
    tokens = logits.argmax(dim=-1)
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    if drawn:
        chosen = [samplings[row] for row in drawn]
        at = torch.tensor([uniforms[row] for row in drawn], dtype=torch.float64, device=logits.device)
        tokens[drawn] = _draw(logits[drawn].to(torch.float64), chosen, at)
    return [int(token) for token in tokens.tolist()]


def _draw(logits: Tensor, samplings: Sequence[Sampling], uniforms: Tensor) -> Tensor:
    """Draw by the inverse of the cumulative distribution, in which the likeliest tokens come first."""
    vocabulary = logits.shape[-1]
    temperatures = torch.tensor([sampling.temperature for sampling in samplings], dtype=torch.float64)
    kept = torch.tensor([min(sampling.top_k or vocabulary, vocabulary) for sampling in samplings])
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    # The largest is subtracted before the division: a temperature near 0 must not overflow.
    scaled = (ordered - ordered[:, :1]) / temperatures.to(logits.device)[:, None]
    beyond = torch.arange(vocabulary, device=logits.device) >= kept.to(logits.device)[:, None]
    weights = scaled.exp().masked_fill(beyond, 0.0)
    cumulative = weights.cumsum(dim=-1)
    if any(sampling.top_p < 1 for sampling in samplings):  # nucleus sampling: https://arxiv.org/abs/1904.09751
        # In float32 a small one would be 0, and nothing would be kept.
        top_p = torch.tensor([[sampling.top_p] for sampling in samplings], dtype=torch.float64, device=logits.device)
        before = (cumulative - weights) / cumulative[:, -1:]
        weights = weights.masked_fill((before >= top_p) & (top_p < 1), 0.0)
        kept = torch.minimum(kept, (weights > 0).sum(dim=-1).cpu())
        cumulative = weights.cumsum(dim=-1)
    places = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)
    places = torch.minimum(places, (kept - 1).to(logits.device)[:, None])
    return tokens.gather(-1, places)[:, 0]
