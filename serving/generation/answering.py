"""The way from a request for text to its answer, whole or token by token, in the form of the route that was asked."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

import orjson
from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from orchestray.serving.generation.generation import Generation, Output
from orchestray.serving.generation.text_request import TextRequest
from orchestray.serving.http.predictor import named_by
from orchestray.serving.http.problems import HttpProblem, as_problem, check_not_replaced, not_ready
from orchestray.serving.http.request_context import SCOPE_KEY, Call, ClientWatch
from orchestray.serving.models.errors import InputError, UnknownModelError
from orchestray.serving.routing.endpoint import ModelVersion
from orchestray.serving.routing.registry import Registry

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from orchestray.serving.generation.engine import Engine


class AnswerForm(Protocol):
    """The form in which a route answers."""

    def whole(self, text: str, generation: Generation) -> dict[str, Any]:
        """Return the JSON of a whole answer."""
        ...

    def step(self, output: Output) -> bytes:
        """Return the server-sent event of one step."""
        ...

    def end(self, generation: Generation) -> bytes:
        """Return the last events of an answer."""
        ...

    def failed(self, problem: HttpProblem) -> bytes:
        """Return the event of an error after the first step."""
        ...


def event(value: Any, name: str = "") -> bytes:
    """Return a server-sent event of a JSON value."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + orjson.dumps(value) + b"\n\n"


async def answer(request: Request, models: Registry, asked: TextRequest, form_of: Any) -> Response:
    """Answer a request for text; a client that leaves frees its place.

    Args:
        request: the request, whose body is read.
        models: models, of which one answers.
        asked: fields of the body.
        form_of: returns the form of the answer, given the model's name and the request's id.

    Raises:
        HttpProblem, InputError, UnknownModelError: see `find`.
        BatchingError: see `Generation`.
    """
    call: Call = request.scope[SCOPE_KEY]
    name, number = named_by(request, call)
    call.asked_version = number if asked.version is None else asked.version
    version, engine = find(models, name if asked.model is None else asked.model, call.asked_version)
    call.reaches(version)
    form: AnswerForm = form_of(version.name, call.request_id)
    generation = engine.generate(asked.prompt, asked, priority=call.priority, deadline_s=call.deadline_s)
    try:
        async with ClientWatch(call, request.receive):
            if not asked.stream:
                whole = form.whole(await generation.text(), generation)
                return Response(orjson.dumps(whole), media_type="application/json")
            # Refusals and early failures are reported by the status, which must come before the answer begins.
            first = await anext(generation, None)
    except BaseException:
        generation.cancel()
        raise
    return _EventStream(call, generation, first, form)


def text_models(models: Registry) -> list[str]:
    """Return the names of the models that generate text."""
    return [each.name for each in models if any(version.generator is not None for version in each.versions)]


def find(models: Registry, name: str | None, number: str | None) -> tuple[ModelVersion, Engine]:
    """Find the version that answers: of the named model or the only one that generates text; named, or by traffic.

    Raises:
        HttpProblem: 503, the endpoint is not ready.
        InputError: several models generate text, and none is named.
        UnknownModelError: the model or version does not exist, or does not generate text.
    """
    if not models.ready:
        raise not_ready()
    there = text_models(models)
    if name is None and len(there) > 1:
        raise InputError("model", f"one of {', '.join(there)}", "nothing")
    if name is None and not there:
        check_not_replaced(endpoint.main for endpoint in models)
        reasons = [endpoint.main.generator_lacking for endpoint in models if endpoint.main.generator_lacking]
        raise UnknownModelError(" ".join(reasons) or "No model here generates text; POST /predict answers.")
    version = models[there[0] if name is None else name].pick(number)
    check_not_replaced((version,))
    if version.generator is None:
        plain = f"The model {version.name} does not generate text; POST /predict answers."
        raise UnknownModelError(version.generator_lacking or plain)
    return version, version.generator


class _EventStream(StreamingResponse):
    """A response that sends each token as it comes; a client that leaves frees the request's place."""

    def __init__(self, call: Call, generation: Generation, first: Output | None, form: AnswerForm) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        self._events = _events(call, generation, first, form)
        super().__init__(self._events, headers=headers, media_type="text/event-stream")
        self._call = call
        self._generation = generation

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events), ClientWatch(self._call, receive):
                await self.stream_response(send)
        finally:
            self._generation.cancel()


async def _events(call: Call, generation: Generation, first: Output | None, form: AnswerForm) -> AsyncGenerator[bytes]:
    try:
        if first is not None:
            yield form.step(first)
        async for output in generation:
            yield form.step(output)
    except Exception as error:  # noqa: BLE001 - the status is sent already: the error becomes an event
        problem = as_problem(error)
        call.status = problem.status  # for the metrics, the log and the watch on a new version, as of a whole answer
        yield form.failed(problem)
    else:
        yield form.end(generation)
