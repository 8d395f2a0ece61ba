"""What can become of a request that is not answered."""

from __future__ import annotations

from orchestray.platform.errors import OrchestrayError


class BatchingError(OrchestrayError):
    """A request got no answer."""


class QueueFullError(BatchingError):
    """The queue holds as many requests as it may, none of them less urgent than this one (HTTP: 503)."""

    def __init__(self, max_queue: int, retry_after_s: float) -> None:
        self.max_queue = max_queue
        self.retry_after_s = retry_after_s
        super().__init__(f"The queue is full: {max_queue} requests wait. Retry in {retry_after_s:.3g} s.")

    def __reduce__(self) -> tuple[type[QueueFullError], tuple[int, float]]:
        return type(self), (self.max_queue, self.retry_after_s)


class DeadlineError(BatchingError):
    """The deadline of a request cannot be met, or has passed.

    `retry_after_s` says when a new attempt has a chance (HTTP: 503); it is None where the deadline passed while the
    request was being computed (HTTP: 504).
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
    """The batch function raised, or answered with a wrong number of results (HTTP: 500); its error is the cause."""


class RunTimeoutError(BatchFunctionError):
    """The batch function did not return within `run_timeout_s` (HTTP: 504)."""


class RunnerLostError(BatchingError):
    """Raised by a runner whose process is gone: its requests, which change nothing, are run once more elsewhere."""


class BatcherClosedError(BatchingError):
    """The batcher takes no requests any more, or was closed without being drained (HTTP: 503)."""
