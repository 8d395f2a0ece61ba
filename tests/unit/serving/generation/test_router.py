"""`POST /generate`: whole and streamed answers, and a status and a sentence for what is wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from orchestray.serving.batching import DeadlineError, QueueFullError
from orchestray.serving.generation.engine import Engine
from orchestray.serving.generation.router import make_generate_router
from orchestray.serving.generation.sampling import Sampling
from orchestray.serving.generation.text import ByteVocabulary
from orchestray.serving.http import Monitor, make_app
from orchestray.serving.routing.endpoint import Share
from orchestray.serving.routing.registry import Registry
from support.generation import engine_of, small_model
from support.http_endpoint import ROW_SUMS, Asked, row_sums, version_of
from support.patience import PATIENCE_S, until

MODEL = small_model(context=32, depth=1)


@asynccontextmanager
async def generating(**settings: Any) -> AsyncIterator[tuple[Asked, Engine]]:
    async with engine_of(MODEL, **settings) as engine:
        monitor, version = Monitor(), version_of(ROW_SUMS, row_sums)
        version.generator = engine
        registry = Registry({"text": [Share(version)]})
        router = make_generate_router(registry, most_tokens=2**40)  # answers that never end, as far as a test sees
        app = make_app(registry, monitor=monitor, routers=[router])
        asked = Asked(app, registry, monitor)
        async with asyncio.timeout(PATIENCE_S), asked.client:
            yield asked, engine
        await registry.close(drain=False)


def post(body: Any, **more: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with generating() as (asked, _):
            content = body if isinstance(body, str) else json.dumps(body)
            return await asked.client.post("/generate", content=content, **more)

    return asyncio.run(ask())


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return name and value of each server-sent event."""
    found = []
    for block in text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((fields.get("event", ""), json.loads(fields["data"])))
    return found


def test_an_answer_is_the_engine_s_and_says_how_it_ended() -> None:
    async def ask() -> None:
        async with generating() as (asked, engine):
            wanted = await engine.generate("import ", Sampling(max_tokens=9, temperature=0.8, seed=3)).text()
            body = {"prompt": "import ", "max_tokens": 9, "temperature": 0.8, "seed": 3}
            answer = await asked.client.post("/generate", json=body)
            assert answer.status_code == 200
            assert answer.json() == {
                "text": wanted,
                "finish_reason": "length",
                "usage": {"prompt_tokens": 7, "tokens": 9},
                "model": "sums",
            }

    asyncio.run(ask())


def test_a_streamed_answer_is_the_whole_one_token_by_token() -> None:
    body = {"prompt": "def ", "max_tokens": 12, "temperature": 1, "seed": 1}
    whole = post(body).json()
    streamed = post({**body, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *tokens, (_, last) = events(streamed.text)
    assert len(tokens) == 12
    assert "".join(value["text"] for _, value in tokens) == whole.pop("text")
    assert last == whole


def test_a_stop_text_ends_the_answer_before_it() -> None:
    body = {"prompt": "x", "max_tokens": 30, "temperature": 1, "seed": 5}
    text = post(body).json()["text"]
    stop = text[4:6]
    answer = post({**body, "stop": [stop]}).json()
    assert (answer["text"], answer["finish_reason"]) == (text[: text.find(stop)], "stop")


def test_a_stop_token_ends_the_answer_before_it() -> None:
    body = {"prompt": "x", "max_tokens": 30, "temperature": 1, "seed": 5}
    tokens = [value["token"] for _, value in events(post({**body, "stream": True}).text)[:-1]]
    stop = next(token for token in tokens if token not in tokens[:4])
    answer = post({**body, "stop_tokens": [stop, 9999]}).json()
    assert (answer["finish_reason"], answer["usage"]["tokens"]) == ("stop", tokens.index(stop))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": "9"}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 2.5}, "max_tokens"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "temperature": True}, "temperature"),
        ({"prompt": "x", "top_k": -1}, "top_k"),
        ({"prompt": "x", "seed": 2**64}, "seed"),
        ({"prompt": "x", "stop": ["a", 1]}, "stop[1]"),
        ({"prompt": "x", "stop_tokens": ["a"]}, "stop_tokens[0]"),
        ({"prompt": "x", "stream": 1}, "stream"),
        ({"prompt": "x", "maxtokens": 1}, "maxtokens"),
    ],
)
def test_wrong_input_is_refused_by_its_field(body: dict[str, Any], field: str) -> None:
    answer = post(body)
    assert answer.status_code == 422
    assert answer.json()["field"] == field
    assert {"error", "request_id", "wanted", "got"} <= answer.json().keys()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("{", 422),
        ('{"prompt": "x", "temperature": NaN}', 422),
        ('{"prompt": "x", "model": "y"}', 404),
        ('{"prompt": "x", "model": ""}', 404),
    ],
)
def test_what_is_no_request_is_refused(body: str, status: int) -> None:
    assert post(body).status_code == status


def test_a_deadline_that_passes_is_504_whole_and_an_error_event_streamed() -> None:
    body = {"prompt": "x", "max_tokens": 10**9}
    assert post(body, headers={"X-Request-Timeout-Ms": "2000"}).status_code == 504
    name, value = events(post({**body, "stream": True}, headers={"X-Request-Timeout-Ms": "2000"}).text)[-1]
    assert (name, value["status"]) == ("error", 504)


def test_a_stream_that_fails_after_its_first_token_counts_as_a_failure() -> None:
    async def ask() -> None:
        async with generating() as (asked, engine):
            counted: list[tuple[str, str, int]] = []
            asked.monitor.on_answer = lambda model, version, status, _: counted.append((model, version, status))
            body = {"prompt": "x", "max_tokens": 10**9, "stream": True}
            streaming = asyncio.create_task(asked.client.post("/generate", json=body))
            await until("a token", lambda: engine.stats.num_tokens > 0)
            await engine.close(drain=False)
            assert events((await streaming).text)[-1][0] == "error"
            assert counted == [("sums", "1", 503)]
            metrics = asked.monitor.text()[0].decode()
            assert 'orchestray_requests_total{model="sums",status="503",version="1"} 1.0' in metrics

    asyncio.run(ask())


def test_a_full_queue_is_503_with_retry_after_streamed_too() -> None:
    async def ask() -> None:
        async with generating(max_sequences=1, max_queue=1) as (asked, engine):
            await engine.generate("x", Sampling(max_tokens=2)).text()
            runs = engine.generate("x", Sampling(max_tokens=10**6))
            await anext(runs)
            engine.generate("x", Sampling(max_tokens=10**6))
            for stream in (False, True):
                answer = await asked.client.post("/generate", json={"prompt": "x", "stream": stream})
                assert answer.status_code == 503
                assert int(answer.headers["retry-after"]) >= 1

    asyncio.run(ask())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place(stream: bool) -> None:
    async def ask() -> None:
        async with generating() as (asked, engine):
            body = json.dumps({"prompt": "x", "max_tokens": 10**9, "stream": stream}).encode()
            left, sent = asyncio.Event(), asyncio.Event()
            messages = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive() -> dict[str, Any]:
                if messages:
                    return messages.pop()
                await left.wait()
                return {"type": "http.disconnect"}

            async def send(message: dict[str, Any]) -> None:
                if message.get("body"):
                    sent.set()

            scope = {
                "type": "http",
                "asgi": {"version": "3.0", "spec_version": "2.3"},
                "http_version": "1.1",
                "method": "POST",
                "scheme": "http",
                "path": "/generate",
                "raw_path": b"/generate",
                "query_string": b"",
                "root_path": "",
                "headers": [(b"content-type", b"application/json")],
                "client": ("127.0.0.1", 1),
                "server": ("127.0.0.1", 80),
            }
            task = asyncio.create_task(asked.app(scope, receive, send))  # type: ignore[arg-type]
            if stream:
                await sent.wait()
            else:
                await engine.generate("y", Sampling(max_tokens=2)).text()
            assert engine.stats.num_running == 1
            left.set()
            await task
            metrics = asked.monitor.text()[0].decode()
            assert 'orchestray_requests_total{model="sums",status="499",version="1"} 1.0' in metrics
            assert (engine.stats.num_running, engine.stats.num_free_blocks) == (0, engine.stats.num_blocks)

    asyncio.run(ask())


def test_the_example_in_the_schema_works_when_it_is_pasted() -> None:
    async def ask() -> None:
        async with generating() as (asked, _):
            document = (await asked.client.get("/openapi.json")).json()
            schema = document["paths"]["/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
            assert (await asked.client.post("/generate", json=schema["example"])).status_code == 200

    asyncio.run(ask())


def test_more_tokens_than_the_endpoint_allows_are_refused_with_the_limit() -> None:
    async def ask() -> None:
        async with engine_of(MODEL) as engine:
            monitor, version = Monitor(), version_of(ROW_SUMS, row_sums)
            version.generator = engine
            registry = Registry({"text": [Share(version)]})
            app = make_app(registry, monitor=monitor, routers=[make_generate_router(registry, most_tokens=5)])
            async with Asked(app, registry, monitor).client as client:
                refused = await client.post("/generate", json={"prompt": "x", "max_tokens": 6})
                assert refused.status_code == 422
                assert refused.json()["error"] == "max_tokens: wanted a whole number from 1 to 5, got 6."
                unsaid = await client.post("/generate", json={"prompt": "x"})
                assert unsaid.json()["usage"]["tokens"] == 5
                document = (await client.get("/openapi.json")).json()
                body = document["paths"]["/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
                assert body["properties"]["max_tokens"]["maximum"] == 5
            await registry.close(drain=False)

    asyncio.run(ask())


def test_prompts_that_are_refused_or_late_count_as_shed_by_their_reason() -> None:
    async def ask() -> str:
        monitor = Monitor()
        async with engine_of(MODEL, max_sequences=1, max_queue=1, listener=monitor.listener("text", "1")) as engine:
            runs = engine.generate("x", Sampling(max_tokens=10**6))
            await anext(runs)
            late = asyncio.get_running_loop().time() - 1
            waits = engine.generate("x", deadline_s=asyncio.get_running_loop().time() + 0.2)
            for deadline_s, refused in ((None, QueueFullError), (late, QueueFullError)):
                with pytest.raises(refused):
                    engine.generate("x", deadline_s=deadline_s)
            with pytest.raises(DeadlineError):
                await waits.text()
            with pytest.raises(DeadlineError):
                engine.generate("x", deadline_s=late)
            return monitor.text()[0].decode()

    metrics = asyncio.run(ask())
    for reason, count in (("queue_full", 2), ("deadline_passed", 1), ("deadline_infeasible", 1)):
        assert f'orchestray_shed_total{{model="text",reason="{reason}",version="1"}} {count}.0' in metrics


def test_a_prompt_longer_than_allowed_is_refused_before_tokens_are_made_of_it() -> None:
    class Counting(ByteVocabulary):
        num_encoded = 0

        def encode(self, text: str) -> list[int]:
            self.num_encoded += 1
            return super().encode(text)

    async def ask() -> None:
        vocabulary = Counting()
        async with engine_of(MODEL, vocabulary=vocabulary) as engine:
            monitor, version = Monitor(), version_of(ROW_SUMS, row_sums)
            version.generator = engine
            registry = Registry({"text": [Share(version)]})
            app = make_app(registry, monitor=monitor, routers=[make_generate_router(registry, most_prompt_bytes=5)])
            async with Asked(app, registry, monitor).client as client:
                for prompt in ("123456", "\u00e4\u00e4\u00e4"):  # bytes are counted, not characters
                    refused = await client.post("/generate", json={"prompt": prompt})
                    assert refused.status_code == 422
                    assert refused.json()["field"] == "prompt"
                    assert refused.json()["got"] == "6 bytes"
                assert vocabulary.num_encoded == 0
                taken = await client.post("/generate", json={"prompt": "12345", "max_tokens": 1})
                assert taken.json()["usage"]["prompt_tokens"] == 5
                document = (await client.get("/openapi.json")).json()
                body = document["paths"]["/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
                assert body["properties"]["prompt"]["maxLength"] == 5
                assert (await client.post("/generate", json=body["example"])).status_code == 200
            await registry.close(drain=False)

    asyncio.run(ask())


def test_why_a_model_of_text_generates_none_is_said() -> None:
    async def ask() -> None:
        version = version_of(ROW_SUMS, row_sums)
        version.generator_lacking = "It is divided."
        registry, monitor = Registry({"text": [Share(version)]}), Monitor()
        app = make_app(registry, monitor=monitor, routers=[make_generate_router(registry)])
        async with Asked(app, registry, monitor).client as client:
            for body in ({"prompt": "x"}, {"prompt": "x", "model": "text"}):
                refused = await client.post("/generate", json=body)
                assert (refused.status_code, refused.json()["error"]) == (404, "It is divided.")
        await registry.close(drain=False)

    asyncio.run(ask())
