"""Errors of requests that are not answered: each gets an error of its own, whatever the batch function raised."""

from __future__ import annotations

from typing import Any

from orchestray.platform.errors import OrchestrayError
from orchestray.serving.batching.queue import Request


class BatchingError(OrchestrayError):
    """An error of a request that got no answer."""


class QueueFullError(BatchingError):
    """A refusal because the queue is full of requests that are at least as urgent (HTTP: 503)."""

    def __init__(self, max_queue: int, retry_after_s: float) -> None:
        self.max_queue = max_queue
        self.retry_after_s = retry_after_s
        super().__init__(f"The queue is full: {max_queue} requests wait. Retry in {retry_after_s:.3g} s.")

    def __reduce__(self) -> tuple[type[QueueFullError], tuple[int, float]]:
        return type(self), (self.max_queue, self.retry_after_s)


class DeadlineError(BatchingError):
    """A refusal because the deadline of a request cannot be met, or has passed.

    `retry_after_s` is the time after which a new attempt has a chance (HTTP: 503). It is None if the deadline passed
    while the request was being computed (HTTP: 504).
    """

    def __init__(self, retry_after_s: float | None) -> None:
        self.retry_after_s = retry_after_s
        if retry_after_s is None:
            text = "The deadline passed while the request was being computed. Allow it more time."
        else:
            text = f"The deadline cannot be met. Retry in {retry_after_s:.3g} s, or allow more time."
        super().__init__(text)

    def __reduce__(self) -> tuple[type[DeadlineError], tuple[float | None]]:
        return type(self), (self.retry_after_s,)


class BatchFunctionError(BatchingError):
    """An exception or a wrong number of results from the batch function (HTTP: 500); its error is the cause."""


class RunTimeoutError(BatchFunctionError):
    """A failure of the batch function to return within `run_timeout_s` (HTTP: 504)."""


class RunnerLostError(BatchingError):
    """The error of a runner whose process is gone: its requests have no side effects, and run once more elsewhere."""


class BatcherClosedError(BatchingError):
    """A refusal because the batcher is closed, or was closed without being drained (HTTP: 503)."""


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
