"""Problems of requests: a status, a sentence, and headers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from orchestray.serving.batching import (
    BatcherClosedError,
    BatchingError,
    DeadlineError,
    QueueFullError,
    RunTimeoutError,
)
from orchestray.serving.models.errors import InputError, RequestError, UnknownModelError

if TYPE_CHECKING:
    from orchestray.serving.routing.endpoint import ModelVersion

CLOSED_RETRY_S = 1.0
"""Seconds after which to retry at an endpoint that is being replaced."""


class HttpProblem(Exception):  # noqa: N818 - it is the client's problem, not an error of this program
    """An unsuccessful answer; its body is JSON: `error` (a sentence), `request_id`, and `more`."""

    def __init__(
        self,
        status: int,
        text: str,
        *,
        headers: Mapping[str, str] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.headers = dict(headers or {})
        self.more = dict(more or {})


def openai_error(problem: HttpProblem) -> dict[str, Any]:
    """Return the body of a problem in the form of OpenAI's API."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(problem.status, "server_error" if problem.status >= 500 else "invalid_request_error")
    error = {"message": problem.text, "type": kind, "param": problem.more.get("field"), "code": None}
    return {"error": error}


def wrong_input(field: str, wanted: str, got: str) -> HttpProblem:
    """Return a 422 that names the field, what was wanted and what came."""
    return HttpProblem(
        422, f"{field}: wanted {wanted}, got {got}.", more={"field": field, "wanted": wanted, "got": got}
    )


def not_ready() -> HttpProblem:
    """Return a 503 for an endpoint that is loading models or shutting down."""
    return unavailable("The endpoint is not ready: it is starting, or about to end.", CLOSED_RETRY_S)


def deserted(version: ModelVersion) -> HttpProblem:
    """Return a 503 for a version whose replicas are gone and not replaced in the usual time."""
    text = (
        f"No replica of the model {version.name}, version {version.version}, is there, and none has come in the time "
        "that takes. The log of Ray Serve's controller, or of the endpoint, has more."
    )
    return unavailable(text, version.batcher.stats.start_s or CLOSED_RETRY_S)


def check_not_replaced(versions: Iterable[ModelVersion]) -> None:
    """Check that no version was ended to make room for its successor.

    Raises:
        HttpProblem: 503, one was; it says when to retry.
    """
    for version in versions:
        if version.replaced_in_s is not None:
            text = f"The model {version.name} is being replaced, and is not there meanwhile. Send the request again."
            raise unavailable(text, max(CLOSED_RETRY_S, version.replaced_in_s))


def unavailable(text: str, retry_after_s: float, status: int = 503) -> HttpProblem:
    """Return a problem with a time to retry: whole seconds in the header, the computed value in the body."""
    whole = max(1, math.ceil(min(retry_after_s, 86_400.0)))
    return HttpProblem(
        status, text, headers={"retry-after": str(whole)}, more={"retry_after_s": round(retry_after_s, 6)}
    )


def as_problem(error: Exception) -> HttpProblem:
    """Return the answer to an error that a prediction raised."""
    if isinstance(error, HttpProblem):
        return error
    if isinstance(error, InputError):
        return wrong_input(error.field, error.wanted, error.got)
    if isinstance(error, RequestError):
        return HttpProblem(422, str(error))
    if isinstance(error, UnknownModelError):
        return HttpProblem(404, str(error))
    if isinstance(error, QueueFullError):
        return unavailable(str(error), error.retry_after_s)
    if isinstance(error, DeadlineError):
        if error.retry_after_s is None:
            return HttpProblem(504, str(error))
        return unavailable(str(error), error.retry_after_s)
    if isinstance(error, RunTimeoutError):
        return HttpProblem(504, "The model did not answer in time.")
    if isinstance(error, BatcherClosedError):
        return unavailable("This version of the model was taken away. Send the request again.", CLOSED_RETRY_S)
    if isinstance(error, BatchingError):
        return HttpProblem(500, "The model could not be run on this request. The log has more, under the request's id.")
    return HttpProblem(500, "The model failed on this request. The log has more, under the request's id.")
