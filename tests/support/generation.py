"""Small language models to generate with, and engines of them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from orchestray.serving.generation.decoder import TransformerDecoder
from orchestray.serving.generation.engine import Engine
from orchestray.serving.generation.sampling import Sampling
from orchestray.trainers.tasks.python_source import PythonSource

CONTEXT = 64


def small_model(context: int = CONTEXT, width: int = 32, depth: int = 2, seed: int = 0) -> nn.Module:
    """Return an untrained model whose weights are large enough that its output depends on all it has seen."""
    torch.manual_seed(seed)
    model = PythonSource(context=context, width=width, depth=depth, heads=4).build_model().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    return model


@contextlib.asynccontextmanager
async def engine_of(model: nn.Module, *, max_sequences: int = 8, **settings: Any) -> AsyncIterator[Engine]:
    """Yield an engine, closed at the end; `settings` are those of `Engine`, and `num_blocks`."""
    torch.set_num_threads(1)
    budget = settings.setdefault("token_budget", 64)
    decoder = TransformerDecoder(
        model, max_rows=budget, max_sequences=max_sequences, num_blocks=settings.pop("num_blocks", None)
    )
    engine = Engine(decoder, max_sequences=max_sequences, **settings)
    try:
        yield engine
    finally:
        await engine.close(drain=False)


async def tokens_of(engine: Engine, prompt: str | Sequence[int], sampling: Sampling) -> list[int]:
    """Return all tokens of an answer."""
    return [output.token async for output in engine.generate(prompt, sampling) if output.token is not None]


@torch.no_grad()
def plain_logits(model: nn.Module, tokens: Sequence[int]) -> Tensor:
    """Return the logits of the model itself after these tokens, [vocabulary]: no cache, no batch."""
    logits: Tensor = model(torch.tensor([list(tokens)]))[0, -1]
    return logits
