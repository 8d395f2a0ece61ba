"""Metrics of several engines: each under the labels of its model."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from orchestray.serving.generation.metrics import GenerationMetrics
from orchestray.serving.generation.sampling import Sampling
from orchestray.serving.http import Monitor, make_app
from orchestray.serving.routing.endpoint import Share
from orchestray.serving.routing.registry import Registry
from support.generation import engine_of, small_model
from support.http_endpoint import ROW_SUMS, Asked, row_sums, version_of

MODEL = small_model(context=32, depth=1)


def test_tokens_and_their_times_are_counted_for_each_model_and_the_page_has_the_means() -> None:
    lengths = {"one": 3, "two": 5, "none": 0}

    async def ask() -> None:
        registry, to = Registry(), CollectorRegistry()
        registry.update(
            {name: [Share(version_of(replace(ROW_SUMS, name=name), row_sums))] for name in lengths},
        )
        to.register(GenerationMetrics(registry))

        def value(metric: str, name: str, **labels: str) -> float | None:
            return to.get_sample_value(f"orchestray_{metric}", {"model": name, "version": "1", **labels})

        assert value("generated_tokens_total", "one") is None
        async with AsyncExitStack() as stack:
            for name, length in lengths.items():
                engine = registry[name].main.generator = await stack.enter_async_context(engine_of(MODEL))
                if length:
                    await engine.generate("x", Sampling(max_tokens=length)).text()
            monitor = Monitor()
            async with Asked(make_app(registry, monitor=monitor), registry, monitor).client as client:
                shown = {each["name"]: each["generation"] for each in (await client.get("/models")).json()}
            for name, length in lengths.items():
                assert value("generated_tokens_total", name) == length
                assert value("first_token_seconds_count", name) == value("first_token_seconds_bucket", name, le="+Inf")
                assert value("first_token_seconds_count", name) == (length > 0)
                assert value("token_seconds_count", name) == max(0, length - 1)
                total = value("token_seconds_sum", name)
                assert shown[name]["token_s"] * max(1, length - 1) == pytest.approx(total)
                assert (total == 0) == (length == 0)
        await registry.close(drain=False)

    asyncio.run(ask())
