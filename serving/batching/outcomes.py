"""Failure of requests: each gets an error of its own, whatever the batch function raised."""

from __future__ import annotations

from typing import Any

from orchestray.serving.batching.errors import BatcherClosedError, BatchFunctionError, RunnerLostError
from orchestray.serving.batching.queue import Request


def fail(request: Request[Any, Any], error: Exception) -> None:
    """Answer a request with an error, unless it is done."""
    if request.done():
        return
    if request.timer is not None:
        request.timer.cancel()
    if isinstance(error, StopIteration):  # a future does not accept it
        error = _because(BatchFunctionError("The batch function answered a request with StopIteration."), error)
    request.set_exception(error)


def as_failure(error: BaseException, *, closed: bool) -> Exception:
    """Return an error for one request of a failed batch: a separate object, so that tracebacks do not mix."""
    if closed and isinstance(error, RunnerLostError):
        return BatcherClosedError("The batcher was closed while the request was run.")
    if isinstance(error, RunnerLostError):
        return _because(BatchFunctionError("Two runners were lost while they ran the request."), error)
    if isinstance(error, BatchFunctionError):
        return _because(type(error)(*error.args), error.__cause__)
    return _because(BatchFunctionError(f"The batch function raised {type(error).__name__}."), error)


def _because(error: Exception, cause: BaseException | None) -> Exception:
    error.__cause__ = cause
    return error
