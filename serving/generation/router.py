"""`POST /generate`: text from a prompt, whole or token by token as server-sent events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from orchestray.serving.generation.generation import Generation, Output
from orchestray.serving.generation.parsing import parse, schema_of
from orchestray.serving.http.body import parse_object, read_body
from orchestray.serving.http.openapi import parameters_of
from orchestray.serving.http.predictor import named_by
from orchestray.serving.http.problems import as_problem, not_ready
from orchestray.serving.http.request_context import Call, ClientWatch, call_of
from orchestray.serving.models.errors import InputError, UnknownModelError
from orchestray.serving.routing.endpoint import ModelVersion
from orchestray.serving.routing.registry import Registry

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from orchestray.serving.generation.engine import Engine

_WANTED = '{"prompt": "import ", "max_tokens": 32}'
_ANSWER_SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "finish_reason": {"type": "string", "enum": ["stop", "length"]},
        "usage": {
            "type": "object",
            "properties": {"prompt_tokens": {"type": "integer"}, "tokens": {"type": "integer"}},
        },
        "model": {"type": "string"},
    },
}
_DESCRIPTION = """Goes on from a prompt.

A model, or a version of it, is named in the body, by `?model=` and `?version=`, or by headers; the body goes first.

With `"stream": true` the answer is server-sent events: a `data:` line of JSON for each token, `{"token", "text"}`, and
a last one with `finish_reason` and `usage`. An error after the first token is an event named `error`.
"""


def make_generate_router(
    models: Registry,
    *,
    max_body_bytes: int = 16 * 2**20,
    max_json_depth: int = 64,
    most_tokens: int = 4096,
    most_prompt_bytes: int = 16384,
) -> APIRouter:
    """Make the route `POST /generate`, for an application of `orchestray.serving.http` that authorises and logs.

    Args:
        models: models, of which the versions with a `generator` answer. The versions of a name share its traffic,
            unless a request names one. A shadow answers requests that name it, and gets no copies of others.
        max_body_bytes, max_json_depth: see `HttpSettings`.
        most_tokens: largest number of tokens that a request may ask for.
        most_prompt_bytes: largest prompt, in bytes of UTF-8; a longer one is refused before it is tokenized.
    """
    router = APIRouter()
    schema = schema_of(most_tokens, most_prompt_bytes)

    async def generate(request: Request) -> Response:
        call = call_of(request.scope)
        body = await read_body(request.receive, max_body_bytes)
        asked = parse(parse_object(body, max_json_depth, _WANTED), most_tokens, most_prompt_bytes)
        name, number = named_by(request, call)
        call.asked_version = number if asked.version is None else asked.version
        version, engine = _find(models, name if asked.model is None else asked.model, call.asked_version)
        call.reaches(version)
        generation = engine.generate(asked.prompt, asked.sampling, priority=call.priority, deadline_s=call.deadline_s)
        try:
            async with ClientWatch(call, request.receive):
                if not asked.is_streaming:
                    return _json({"text": await generation.text(), **_end(generation, version.name)})
                # Refusals and early failures are reported by the status, which must come before the answer begins.
                first = await anext(generation, None)
        except BaseException:
            generation.cancel()
            raise
        return _EventStream(call, version.name, generation, first)

    router.add_api_route(
        "/generate",
        generate,
        methods=["POST"],
        description=_DESCRIPTION,
        summary="Generate text",
        response_class=Response,
        responses={
            200: {"content": {"application/json": {"schema": _ANSWER_SCHEMA}, "text/event-stream": {}}},
            404: {"description": "No such model or version, or it generates no text"},
            422: {"description": "Wrong input: names the field, what was wanted and what came"},
            503: {"description": "Too much to do: see Retry-After"},
            504: {"description": "The deadline passed"},
        },
        openapi_extra={
            "parameters": parameters_of("Default: the one that generates text"),
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        },
    )
    return router


def _find(models: Registry, name: str | None, number: str | None) -> tuple[ModelVersion, Engine]:
    """Find the version that answers: of the named model or the only one that generates text; named, or by traffic.

    Raises:
        HttpProblem: 503, the endpoint is not ready.
        InputError: several models generate text, and none is named.
        UnknownModelError: the model or version does not exist, or does not generate text.
    """
    if not models.ready:
        raise not_ready()
    there = [each.name for each in models if any(version.generator is not None for version in each.versions)]
    if name is None and len(there) > 1:
        raise InputError("model", f"one of {', '.join(there)}", "nothing")
    if name is None and not there:
        reasons = [endpoint.main.generator_lacking for endpoint in models if endpoint.main.generator_lacking]
        raise UnknownModelError(" ".join(reasons) or "No model here generates text; POST /predict answers.")
    version = models[there[0] if name is None else name].pick(number)
    if version.generator is None:
        plain = f"The model {version.name} does not generate text; POST /predict answers."
        raise UnknownModelError(version.generator_lacking or plain)
    return version, version.generator


def _end(generation: Generation, model: str) -> dict[str, Any]:
    return {
        "finish_reason": generation.finish_reason,
        "usage": {"prompt_tokens": generation.num_prompt_tokens, "tokens": generation.num_tokens},
        "model": model,
    }


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


class _EventStream(Response):
    """A response that sends each token as it comes; a client that leaves frees the request's place."""

    media_type = "text/event-stream"

    def __init__(self, call: Call, model: str, generation: Generation, first: Output | None) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._call = call
        self._model = model
        self._generation = generation
        self._first = first

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        async def event(value: Mapping[str, Any], name: str = "") -> None:
            head = f"event: {name}\n".encode() if name else b""
            data = head + b"data: " + orjson.dumps(value) + b"\n\n"
            await send({"type": "http.response.body", "body": data, "more_body": True})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async with ClientWatch(self._call, receive):
                await self._events(event)
        finally:
            self._generation.cancel()
        await send({"type": "http.response.body", "body": b""})

    async def _events(self, event: Any) -> None:
        try:
            if self._first is not None:
                await event(_event(self._first))
            async for output in self._generation:
                await event(_event(output))
        except Exception as error:  # noqa: BLE001 - the status is sent already: the error becomes an event
            problem = as_problem(error)
            content = {"error": problem.text, "status": problem.status, "request_id": self._call.request_id}
            await event({**content, **problem.more}, "error")
            return
        await event(_end(self._generation, self._model))


def _event(output: Output) -> dict[str, Any]:
    return {"token": output.token, "text": output.text}
