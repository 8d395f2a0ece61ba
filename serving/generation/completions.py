"""`POST /v1/completions` and `GET /v1/models`, as OpenAI's clients ask: https://platform.openai.com/docs/api-reference."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from orchestray.serving.generation.answering import answer, event, text_models
from orchestray.serving.generation.generation import Generation, Output
from orchestray.serving.generation.parsing import Asked, check_limits, shown
from orchestray.serving.generation.sampling import Sampling
from orchestray.serving.http.body import parse_object, read_body
from orchestray.serving.http.problems import HttpProblem, not_ready, openai_error
from orchestray.serving.models.errors import InputError, UnknownModelError
from orchestray.serving.routing.registry import Registry

Zero = Annotated[float, Field(ge=0, le=0)]
_WANTED = '{"prompt": "import ", "max_tokens": 32}'
_DONE = b"data: [DONE]\n\n"
_ONLY = {
    "n": "1: a request has one answer",
    "best_of": "1: a request has one answer",
    "echo": "false: an answer does not repeat its prompt",
    "logprobs": "null: probabilities of tokens are not answered",
    "suffix": "null: text is not put in between",
    "presence_penalty": "0: repetitions are not punished",
    "frequency_penalty": "0: repetitions are not punished",
    "logit_bias": "null: tokens are not weighted",
    "prompt": "one text, or a list of one: ask once for each text",
}
"""Maps fields to the values that are supported of them, in words."""


class _StreamOptions(BaseModel):
    include_usage: bool = False
    include_obfuscation: bool = False


class Completion(BaseModel):
    """The body of a request; fields that OpenAI knows besides must have the values that change nothing."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)]
    max_tokens: int | None = 16
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    user: str | None = None
    n: Literal[1] | None = 1
    best_of: Literal[1] | None = 1
    echo: Literal[False] | None = False
    logprobs: None = None
    suffix: None = None
    presence_penalty: Zero | None = 0
    frequency_penalty: Zero | None = 0
    logit_bias: None = None


def add_completions(
    router: APIRouter, models: Registry, max_body_bytes: int, max_json_depth: int, most_tokens: int, most_bytes: int
) -> None:
    """Add the routes to a router; the limits are those of `make_generate_router`."""

    async def completions(request: Request) -> Response:
        body = parse_object(await read_body(request.receive, max_body_bytes), max_json_depth, _WANTED)
        asked, has_usage = _parse(body)
        check_limits(asked, most_tokens, most_bytes)
        return await answer(request, models, asked, partial(_Form, has_usage=has_usage))

    def listed(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": started_s, "owned_by": "orchestray"}

    async def served() -> Response:
        if not models.ready:
            raise not_ready()
        found = {"object": "list", "data": [listed(name) for name in text_models(models)]}
        return Response(orjson.dumps(found), media_type="application/json")

    async def one(name: str) -> Response:
        if name not in text_models(models):
            raise UnknownModelError(f"No model {name[:60]!r} here generates text; GET /v1/models lists those that do.")
        return Response(orjson.dumps(listed(name)), media_type="application/json")

    started_s = int(time.time())
    example = {"prompt": "import ", "max_tokens": min(32, most_tokens), "temperature": 0.8, "seed": 1}
    schema = Completion.model_json_schema(ref_template="#/components/schemas/{model}")
    schema["properties"]["stream_options"] = {}
    schema.pop("$defs", None)
    content = {"application/json": {"schema": schema, "example": example}}
    router.add_api_route(
        "/v1/completions",
        completions,
        methods=["POST"],
        summary="Generate text, as OpenAI's clients ask",
        response_class=Response,
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )
    summary = "The models that generate text, as OpenAI's clients ask"
    router.add_api_route("/v1/models", served, methods=["GET"], summary=summary, response_class=Response)
    # A schema that names no models would have clients ask for those that are not there.
    router.add_api_route("/v1/models/{name}", one, methods=["GET"], response_class=Response, include_in_schema=False)


def _parse(body: Mapping[str, Any]) -> tuple[Asked, bool]:
    """Return the fields of a body, and True if a stream is to end with the usage.

    Raises:
        InputError: names the first field that is invalid.
    """
    try:
        given = Completion.model_validate({key: value for key, value in body.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            wanted = f"one of {', '.join(Completion.model_fields)}"
            raise InputError(name[:100], wanted, "a name that is none of them") from None
        wanted = _ONLY.get(name, first["msg"].removeprefix("Input should be "))
        raise InputError(name, wanted, shown(body[name]) if name in body else "nothing") from None
    stop = (given.stop,) if isinstance(given.stop, str) else tuple(given.stop or ())
    sampling = Sampling(
        max_tokens=16 if given.max_tokens is None else given.max_tokens,
        temperature=1.0 if given.temperature is None else given.temperature,
        top_p=1.0 if given.top_p is None else given.top_p,
        seed=given.seed,
        stop=stop,
    )
    prompt = given.prompt if isinstance(given.prompt, str) else given.prompt[0]
    has_usage = given.stream_options is not None and given.stream_options.include_usage
    return Asked(prompt, sampling, bool(given.stream), given.model, None), has_usage


class _Form:
    """OpenAI's form of an answer."""

    def __init__(self, model: str, request_id: str, *, has_usage: bool) -> None:
        self._head = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._has_usage = has_usage

    def whole(self, text: str, generation: Generation) -> dict[str, Any]:
        return {**self._chunk(text, generation.finish_reason), "usage": _usage(generation)}

    def step(self, output: Output) -> bytes:
        return event(self._chunk(output.text, None))

    def end(self, generation: Generation) -> bytes:
        last = event(self._chunk("", generation.finish_reason))
        usage = event({**self._head, "choices": [], "usage": _usage(generation)}) if self._has_usage else b""
        return last + usage + _DONE

    def failed(self, problem: HttpProblem) -> bytes:
        return event(openai_error(problem))

    def _chunk(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head, "choices": [choice]}


def _usage(generation: Generation) -> dict[str, int]:
    prompt, answered = generation.num_prompt_tokens, generation.num_tokens
    return {"prompt_tokens": prompt, "completion_tokens": answered, "total_tokens": prompt + answered}
