"""`POST /generate` by the version that a request names, or by the traffic; an update leaves no answer half."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from torch import Tensor

from orchestray.serving.application.endpoint import LiveEndpoint
from orchestray.serving.config.load import load_serve_config
from orchestray.serving.config.schema import ModelSection, ServeConfig
from orchestray.serving.generation.decoder import TransformerDecoder
from orchestray.serving.generation.engine import Engine
from orchestray.serving.generation.router import make_generate_router
from orchestray.serving.generation.sampling import Sampling
from orchestray.serving.generation.scheduler import Step
from orchestray.serving.http import Monitor, make_app
from orchestray.serving.routing.endpoint import ModelVersion, Share
from orchestray.serving.routing.registry import Registry
from support.generation import engine_of, small_model
from support.http_endpoint import ROW_SUMS, Asked, row_sums, version_of
from support.patience import PATIENCE_S
from support.served import written_run

MODELS = {number: small_model(context=32, depth=1, seed=int(number)) for number in ("1", "2", "3")}
BODY = {"prompt": "import ", "max_tokens": 8, "temperature": 1, "seed": 3}
SAMPLING = Sampling(max_tokens=8, temperature=1.0, seed=3)


@asynccontextmanager
async def generating() -> AsyncIterator[tuple[Asked, dict[str, str]]]:
    """Yield an endpoint, and what each version answers: 1 has the traffic, 2 none, 3 is a shadow."""
    async with contextlib.AsyncExitStack() as stack:
        monitor, shares, texts = Monitor(), [], {}
        for number, model in MODELS.items():
            version = version_of(replace(ROW_SUMS, version=number), row_sums)
            version.generator = await stack.enter_async_context(engine_of(model))
            texts[number] = await version.generator.generate(BODY["prompt"], SAMPLING).text()
            shares.append(Share(version, 100.0 if number == "1" else 0.0, shadow=number == "3"))
        registry = Registry({"sums": shares})
        app = make_app(registry, monitor=monitor, routers=[make_generate_router(registry)])
        asked = Asked(app, registry, monitor)
        async with asyncio.timeout(PATIENCE_S), asked.client:
            yield asked, texts
        await registry.close(drain=False)


def ways(version: str) -> list[tuple[str, dict[str, str], dict[str, Any]]]:
    """Return each way to name a version: the query, headers, and the rest of the body."""
    return [
        (f"?version={version}", {}, {}),
        (f"?version={version}&model=sums", {}, {}),
        ("", {"X-Model-Version": version}, {}),
        ("", {"X-Model-Version": version, "X-Model": "sums"}, {}),
        ("", {}, {"version": version}),
        ("", {}, {"version": int(version), "model": "sums"}),
        ("?model=sums", {"X-Model-Version": version}, {}),
        (
            "?version=1&model=none",
            {"X-Model-Version": "1"},
            {"version": version, "model": "sums"},
        ),  # the body goes first
    ]


@pytest.mark.parametrize("number", ["1", "2", "3"])
def test_the_version_that_a_request_names_answers_it_also_without_traffic_and_as_a_shadow(number: str) -> None:
    async def ask() -> None:
        async with generating() as (asked, texts):
            assert len(set(texts.values())) == 3
            for query, headers, more in ways(number):
                answer = await asked.client.post(f"/generate{query}", json={**BODY, **more}, headers=headers)
                assert answer.status_code == 200, answer.text
                assert (answer.json()["text"], answer.headers["x-model-version"]) == (texts[number], number)

    asyncio.run(ask())


def test_who_names_no_version_is_answered_by_one_with_traffic_and_a_shadow_gets_no_copy() -> None:
    async def ask() -> None:
        async with generating() as (asked, texts):
            before = [version.generator.stats.num_tokens for version in asked.registry.versions if version.generator]
            for stream in (False, True):
                answer = await asked.client.post("/generate", json={**BODY, "stream": stream})
                assert answer.headers["x-model-version"] == "1"
                assert stream or answer.json()["text"] == texts["1"]
            after = [version.generator.stats.num_tokens for version in asked.registry.versions if version.generator]
            assert [now - was for was, now in zip(before, after, strict=True)] == [16, 0, 0]

    asyncio.run(ask())


def test_a_version_that_there_is_not_is_404_and_says_which_there_are() -> None:
    async def ask() -> None:
        async with generating() as (asked, _):
            for query, headers, more in ways("9"):
                answer = await asked.client.post(f"/generate{query}", json={**BODY, **more}, headers=headers)
                told = "There is no version 9 of the model sums; there is 1, 2, 3."
                assert (answer.status_code, answer.json()["error"]) == (404, told)
            for query, headers, more in (
                ("?model=none", {}, {}),
                ("", {"X-Model": "none"}, {}),
                ("", {}, {"model": "none"}),
            ):
                answer = await asked.client.post(f"/generate{query}", json={**BODY, **more}, headers=headers)
                assert answer.status_code == 404
                assert "There is no model none" in answer.json()["error"]
            wrong = await asked.client.post("/generate", json={**BODY, "version": [1]})
            assert (wrong.status_code, wrong.json()["field"]) == (422, "version")

    asyncio.run(ask())


class Held(TransformerDecoder):
    """A decoder that stands still at its fifth step until it may go on."""

    num_steps = 0

    def __init__(self, seed: int) -> None:
        super().__init__(small_model(context=32, depth=1, seed=seed))
        self.stands, self.go_on = threading.Event(), threading.Event()

    def step(self, step: Step) -> Tensor:
        self.num_steps += 1
        if self.num_steps == 5:
            self.stands.set()
            self.go_on.wait(PATIENCE_S)
        return super().step(step)


class Started:
    """A starter of versions whose number is the seed of their models; each stands still once."""

    address = None

    def __init__(self) -> None:
        self.decoders: dict[int, Held] = {}

    async def start(self, model: ModelSection, _: ServeConfig) -> ModelVersion:
        version = version_of(replace(ROW_SUMS, name=model.name, version=str(model.version)), row_sums)
        self.decoders[model.version] = Held(model.version)
        version.generator = Engine(self.decoders[model.version], num_threads=1)
        return version

    def content(self, _: ModelSection) -> str:
        return ""

    def move(self, _: str | None) -> bool:
        return False

    async def close(self) -> None:
        pass


def test_an_answer_that_an_update_meets_ends_by_the_model_that_began_it_and_the_next_is_of_the_new_one(
    tmp_path: Path,
) -> None:
    body = {"prompt": "x", "max_tokens": 12, "temperature": 1, "seed": 1}

    run = str(written_run(tmp_path))

    def config(version: int) -> dict[str, Any]:
        return {"name": "texts", "models": [{"name": "text", "run": run, "version": version}]}

    async def whole(seed: int) -> str:
        async with engine_of(small_model(context=32, depth=1, seed=seed)) as engine:
            return await engine.generate("x", Sampling(max_tokens=12, temperature=1.0, seed=1)).text()

    async def main() -> None:
        started = Started()
        live = LiveEndpoint(load_serve_config(config(1)), make_starters=lambda _: started)
        await live.start()
        transport = httpx.ASGITransport(live, raise_app_exceptions=False)
        async with asyncio.timeout(PATIENCE_S), httpx.AsyncClient(transport=transport, base_url="http://at") as client:
            streaming = asyncio.create_task(client.post("/generate", json={**body, "stream": True}))
            await asyncio.to_thread(started.decoders[1].stands.wait, PATIENCE_S)
            assert "text version 2 is new; text version 1 is gone" in await live.apply(config(2))
            started.decoders[2].go_on.set()
            after = await client.post("/generate", json=body)
            assert (after.headers["x-model-version"], after.json()["text"]) == ("2", await whole(2))
            assert (await client.post("/generate?version=1", json=body)).status_code == 404
            assert not streaming.done()
            started.decoders[1].go_on.set()
            stream = await streaming
            assert (stream.status_code, stream.headers["x-model-version"]) == (200, "1")
            *tokens, last = [json.loads(block.removeprefix("data: ")) for block in stream.text.split("\n\n")[:-1]]
            assert "".join(token["text"] for token in tokens) == await whole(1) != await whole(2)
            assert (last["finish_reason"], last["usage"]["tokens"]) == ("length", 12)
            await live.drained()
        await live.close()

    asyncio.run(main())
