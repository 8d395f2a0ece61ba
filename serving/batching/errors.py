"""Errors of requests that are not answered."""

from __future__ import annotations

from orchestray.platform.errors import OrchestrayError


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
