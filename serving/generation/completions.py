"""`POST /v1/completions` and `GET /v1/models`, as OpenAI's clients ask: https://platform.openai.com/docs/api-reference."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from orchestray.serving.generation.answering import answer, event, text_models
from orchestray.serving.generation.generation import Generation, Output
from orchestray.serving.generation.text_request import TextBody, TextLimits, TextRequest
from orchestray.serving.http.openapi import problems
from orchestray.serving.http.predictor import Predictor
from orchestray.serving.http.problems import HttpProblem, not_ready, openai_error
from orchestray.serving.models.errors import UnknownModelError
from orchestray.serving.routing.registry import Registry

Zero = Annotated[float, Field(ge=0, le=0)]
_DONE = b"data: [DONE]\n\n"


class Completion(TextRequest):
    """The body of a request; fields that OpenAI knows besides must have the values that change nothing."""

    max_tokens: Annotated[int, Field(ge=1)] = 16
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """a finite number >= 0; 0 takes the likeliest token"""
    stream_options: dict[Literal["include_usage", "include_obfuscation"], bool] = Field(default={})
    user: str | None = None
    n: Literal[1] = 1
    """1: a request has one answer"""
    best_of: Literal[1] = 1
    """1: a request has one answer"""
    echo: Literal[False] = False
    """false: an answer does not repeat its prompt"""
    logprobs: None = None
    """null: probabilities of tokens are not answered"""
    suffix: Literal[""] | None = None
    """null: text is not put in between"""
    presence_penalty: Zero = 0
    """0: repetitions are not punished"""
    frequency_penalty: Zero = 0
    """0: repetitions are not punished"""
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    """null: tokens are not weighted"""


def add_completions(router: APIRouter, models: Registry, limits: TextLimits) -> None:
    """Add the routes to a router."""
    body, started_s = TextBody(Completion, limits), int(time.time())

    async def completions(request: Request) -> Response:
        asked = await body.read(request)
        has_usage = asked.stream_options.get("include_usage", False)
        return await answer(request, models, asked, partial(_Form, has_usage=has_usage))

    def listed(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": started_s, "owned_by": "orchestray"}

    async def served() -> Response:
        if not models.ready:
            raise not_ready()
        found = {"object": "list", "data": [listed(name) for name in text_models(models)]}
        return Response(orjson.dumps(found), media_type="application/json")

    async def one(name: str) -> Response:
        if name not in text_models(models) and name in models:  # asked by KServe's V1 protocol
            Predictor(models).check_ready(models[name].answering)
            return Response(orjson.dumps({"name": name, "ready": True}), media_type="application/json")
        if name not in text_models(models):
            raise UnknownModelError(f"No model {name[:60]!r} here generates text; GET /v1/models lists those that do.")
        return Response(orjson.dumps(listed(name)), media_type="application/json")

    router.add_api_route(
        "/v1/completions",
        completions,
        methods=["POST"],
        summary="Generate text, as OpenAI's clients ask",
        response_class=Response,
        responses=_problems(),
        openapi_extra={"requestBody": body.openapi()},
    )
    summary = "The models that generate text, as OpenAI's clients ask"
    of_models: dict[int | str, dict[str, Any]] = {
        status: answer for status, answer in _problems().items() if status in {401, 429, 503}
    }
    router.add_api_route(
        "/v1/models", served, methods=["GET"], summary=summary, response_class=Response, responses=of_models
    )
    # A schema that names no models would have clients ask for those that are not there.
    router.add_api_route("/v1/models/{name}", one, methods=["GET"], response_class=Response, include_in_schema=False)


def _problems() -> dict[int | str, dict[str, Any]]:
    """Return the errors in the form of OpenAI's API, in which wrong input is a 400."""
    return {
        400 if status == 422 else status: {"description": answer["description"]}
        for status, answer in problems().items()
    }


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
        return event(self._part(output.text, None))

    def end(self, generation: Generation) -> bytes:
        last = event(self._part("", generation.finish_reason))
        usage = event({**self._head, "choices": [], "usage": _usage(generation)}) if self._has_usage else b""
        return last + usage + _DONE

    def failed(self, problem: HttpProblem) -> bytes:
        return event(openai_error(problem))

    def _part(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        """Return one chunk of a stream; the usage is null in each before the one that tells it."""
        usage = {"usage": None} if self._has_usage else {}
        return {**self._chunk(text, finish_reason), **usage}

    def _chunk(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head, "choices": [choice]}


def _usage(generation: Generation) -> dict[str, int]:
    prompt, answered = generation.num_prompt_tokens, generation.num_tokens
    return {"prompt_tokens": prompt, "completion_tokens": answered, "total_tokens": prompt + answered}
