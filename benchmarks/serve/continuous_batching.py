"""Continuous against static batching of text generation: tokens a second, answers of geometric length."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from typing import Any

from harness import benchmark

_MODEL = {"context": 512, "width": 256, "depth": 4, "heads": 8}
_MAX_SEQUENCES, _TOKEN_BUDGET = 32, 128
_MEAN_LENGTH, _PROMPT_LENGTH = 32, 16
_NUM_REQUESTS, _NUM_REQUESTS_QUICK = 256, 48
_ROUNDS = 5
_GOAL = 2.0
_CONTINUOUS, _STATIC, _SHRINKING, _ONE = "continuous", "static", "static, shrinking", "one at a time"


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    import torch

    from orchestray.trainers.tasks.python_source import PythonSource

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = PythonSource(**_MODEL).build_model()
    num_requests = _NUM_REQUESTS_QUICK if options.quick else _NUM_REQUESTS
    report.settings = {
        "model": f"python_source {_MODEL}, untrained",
        "requests": num_requests,
        "answers": f"geometric of mean {_MEAN_LENGTH}, at most {_MODEL['context'] - _PROMPT_LENGTH} tokens",
        "prompts": f"{_PROMPT_LENGTH} tokens",
        "max_sequences": _MAX_SEQUENCES,
        "token_budget": _TOKEN_BUDGET,
        "torch threads": 1,
    }
    tokens_per_s: dict[str, list[float]] = {name: [] for name in (_CONTINUOUS, _STATIC, _SHRINKING, _ONE)}
    steps: dict[str, int] = {}

    def measured(name: str, count: int, **settings: Any) -> None:
        speed, steps[name] = asyncio.run(_generate(model, _lengths(count, seed=len(tokens_per_s[name])), **settings))
        tokens_per_s[name].append(speed)

    benchmark.alternate(
        {
            _CONTINUOUS: lambda: measured(_CONTINUOUS, num_requests),
            _STATIC: lambda: measured(_STATIC, num_requests, keeps_shape=True),
            _SHRINKING: lambda: measured(_SHRINKING, num_requests, continuous=False),
            _ONE: lambda: measured(_ONE, num_requests // 8, max_sequences=1),
        },
        options.rounds(_ROUNDS),
        benchmark.say,
    )
    for name, values in tokens_per_s.items():
        report.add(f"{name}, generated", "tokens/s", values)
    ratio = report.compare("continuous / static, tokens/s", tokens_per_s[_CONTINUOUS], tokens_per_s[_STATIC])
    report.compare("continuous / static, shrinking, tokens/s", tokens_per_s[_CONTINUOUS], tokens_per_s[_SHRINKING])
    report.compare("continuous / one at a time, tokens/s", tokens_per_s[_CONTINUOUS], tokens_per_s[_ONE])
    report.goal("static / continuous, tokens/s", 1 / ratio, 1 / _GOAL)
    report.notes += [
        f"Steps of the model in the last round: continuous {steps[_CONTINUOUS]}, static {steps[_STATIC]}.",
        (
            "Static batching is the same engine, which admits the next requests when the longest answer of the batch "
            "is done. A batch keeps its shape until then, as where it is one call of a model's generate(); what is "
            "generated beyond the end of an answer does not count. Shrinking: rows that are done are not computed."
        ),
    ]


def _lengths(count: int, seed: int) -> list[int]:
    """Draw geometric lengths of the mean, cut at what the context holds; the same for every side of a round."""
    rng, most = random.Random(seed), _MODEL["context"] - _PROMPT_LENGTH
    lengths = []
    for _ in range(count):
        length = 1
        while length < most and rng.random() > 1 / _MEAN_LENGTH:
            length += 1
        lengths.append(length)
    return lengths


async def _generate(
    model: Any,
    lengths: list[int],
    *,
    continuous: bool = True,
    keeps_shape: bool = False,
    max_sequences: int = _MAX_SEQUENCES,
) -> tuple[float, int]:
    """Submit all requests at once; return tokens a second, and steps."""
    from orchestray.serving.generation.decoder import TransformerDecoder
    from orchestray.serving.generation.engine import Engine
    from orchestray.serving.generation.sampling import Sampling

    decoder = TransformerDecoder(model, max_rows=_TOKEN_BUDGET, max_sequences=max_sequences)
    engine = Engine(
        decoder,
        max_sequences=max_sequences,
        token_budget=_TOKEN_BUDGET,
        continuous=continuous and not keeps_shape,
        num_threads=1,
    )
    generated = _longest_of_each_batch(lengths, max_sequences) if keeps_shape else lengths
    prompts = random.Random(len(lengths))
    await engine.generate([1] * _PROMPT_LENGTH, Sampling(max_tokens=4)).text()
    before = engine.stats.num_steps
    begin_s = time.perf_counter()
    generations = [
        engine.generate([prompts.randrange(256) for _ in range(_PROMPT_LENGTH)], Sampling(max_tokens=length))
        for length in generated
    ]
    await asyncio.gather(*(generation.text() for generation in generations))
    seconds = time.perf_counter() - begin_s
    if [generation.num_tokens for generation in generations] != generated:
        raise benchmark.BenchmarkError("not all tokens were generated")
    benchmark.say(f"  {sum(lengths)} tokens in {seconds:.1f} s, {statistics.fmean(lengths):.1f} an answer")
    num_steps = engine.stats.num_steps - before
    await engine.close()
    return sum(lengths) / seconds, num_steps


def _longest_of_each_batch(lengths: list[int], batch_size: int) -> list[int]:
    batches = [lengths[start : start + batch_size] for start in range(0, len(lengths), batch_size)]
    return [max(batch) for batch in batches for _ in batch]


if __name__ == "__main__":
    benchmark.run(
        "continuous_batching",
        "Continuous against static batching of text generation, answers of geometric length with mean 32: tokens/s.",
        measure,
    )
