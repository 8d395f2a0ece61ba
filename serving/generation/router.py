"""`POST /generate`: text from a prompt, whole or token by token as server-sent events."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from orchestray.serving.generation.answering import answer, event
from orchestray.serving.generation.completions import add_completions
from orchestray.serving.generation.generation import Generation, Output
from orchestray.serving.generation.text_request import TextBody, TextLimits, TextRequest
from orchestray.serving.http.openapi import parameters_of, problems
from orchestray.serving.http.problems import HttpProblem
from orchestray.serving.routing.registry import Registry

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
    most_tokens: int = 4096,
    most_prompt_bytes: int = 16384,
) -> APIRouter:
    """Make the routes `POST /generate` and `/v1/...`, for an application of `serving.http` that authorises and logs.

    Args:
        models: models, of which the versions with a `generator` answer. The versions of a name share its traffic,
            unless a request names one. A shadow answers requests that name it, and gets no copies of others.
        max_body_bytes: see `HttpSettings`.
        most_tokens: largest number of tokens that a request may ask for.
        most_prompt_bytes: largest prompt, in bytes of UTF-8; a longer one is refused before it is tokenized.
    """
    router, limits = APIRouter(), TextLimits(max_body_bytes, most_tokens, most_prompt_bytes)
    body = TextBody(TextRequest, limits)

    async def generate(request: Request) -> Response:
        return await answer(request, models, await body.read(request), _Form)

    router.add_api_route(
        "/generate",
        generate,
        methods=["POST"],
        description=_DESCRIPTION,
        summary="Generate text",
        response_class=Response,
        responses={
            200: {"content": {"application/json": {"schema": _ANSWER_SCHEMA}, "text/event-stream": {}}},
            **problems(),
        },
        openapi_extra={
            "parameters": parameters_of("Default: the one that generates text"),
            "requestBody": body.openapi(),
        },
    )
    add_completions(router, models, limits)
    return router


class _Form:
    """The form of `/generate`."""

    def __init__(self, model: str, request_id: str) -> None:
        self._model = model
        self._request_id = request_id

    def whole(self, text: str, generation: Generation) -> dict[str, Any]:
        return {"text": text, **self._last(generation)}

    def step(self, output: Output) -> bytes:
        return event({"token": output.token, "text": output.text})

    def end(self, generation: Generation) -> bytes:
        return event(self._last(generation))

    def failed(self, problem: HttpProblem) -> bytes:
        content = {"error": problem.text, "status": problem.status, "request_id": self._request_id}
        return event({**content, **problem.more}, "error")

    def _last(self, generation: Generation) -> dict[str, Any]:
        return {
            "finish_reason": generation.finish_reason,
            "usage": {"prompt_tokens": generation.num_prompt_tokens, "tokens": generation.num_tokens},
            "model": self._model,
        }
