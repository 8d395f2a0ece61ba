"""/generate and /predict at once on one GPU: answers as of each alone, and the cache's bytes are those torch has."""

from __future__ import annotations

import asyncio
from typing import Any

from gpu.check import Place, Verdict, main

_PROMPTS = ("import os", "def f(x):", "class A", "return ", "# a comment", "for i in")


def run(place: Place) -> Verdict:
    """Serve one language model in both ways, first in turns, then at once."""
    import torch

    from gpu import training
    from orchestray.serving.generation.decoder import TransformerDecoder
    from orchestray.serving.models.served import ServedModel

    device = place.device()
    task = training.resolve_task({**training.TEXT, "context": 128, "width": place.sized(512, 32)})
    torch.manual_seed(0)
    model = task.build_model()
    served = ServedModel(model, torch.zeros(128, dtype=torch.long), device=device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    decoder = TransformerDecoder(served.module, max_rows=64, max_sequences=8)
    taken = torch.cuda.memory_allocated(device) - before if device.type == "cuda" else decoder.cache_bytes
    texts = torch.randint(0, 256, (8, 128))
    samples = [served.signature.parse(row.tolist()) for row in texts]
    rounds = place.sized(50, 2)
    alone = _answers(served, samples), asyncio.run(_generated(decoder, place.sized(64, 8)))

    async def both() -> tuple[list[Any], list[list[int]]]:
        async def predict() -> list[Any]:
            return [await asyncio.to_thread(_answers, served, samples) for _ in range(rounds)]

        found, tokens = await asyncio.gather(predict(), _generated(decoder, place.sized(64, 8)))
        return found, tokens

    found, tokens = asyncio.run(both())
    same_rows = all(torch.equal(each, alone[0]) for each in found)
    same_tokens = tokens == alone[1]
    off = abs(taken / decoder.cache_bytes - 1)
    return Verdict(
        same_rows and same_tokens and off <= 0.05,
        f"answers as alone: {same_rows}, tokens as alone: {same_tokens}, cache {decoder.cache_bytes} bytes, "
        f"of torch {taken} ({off:.1%} apart, <= 5%)",
    )


def _answers(served: Any, samples: list[Any]) -> Any:
    import torch

    return torch.stack([torch.from_numpy(answer["outputs"]) for answer in served.run(samples)])


async def _generated(decoder: Any, most: int) -> list[list[int]]:
    """Return the tokens of each prompt, all generated together and greedily."""
    from orchestray.serving.generation.engine import Engine
    from orchestray.serving.generation.sampling import Sampling

    engine = Engine(decoder, max_sequences=8, token_budget=64)
    try:

        async def tokens(prompt: str) -> list[int]:
            answer = engine.generate(prompt, Sampling(max_tokens=most, temperature=0.0))
            return [output.token async for output in answer if output.token is not None]

        return [*await asyncio.gather(*(tokens(prompt) for prompt in _PROMPTS))]
    finally:
        await engine.close(drain=False)


if __name__ == "__main__":
    main(run)
