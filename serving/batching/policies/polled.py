"""A policy that waits a fixed time from when a free runner takes up the first request."""

from __future__ import annotations

from orchestray.serving.batching.policies.base import Opportunity
from orchestray.serving.batching.policies.fixed import Fixed


class Polled(Fixed):
    """A policy that waits `timeout_ms` from when a free runner finds the oldest request, as in TorchServe.

    `Model.pollBatch` of TorchServe's frontend takes the first request of the queue, and others within
    `max_batch_delay`. So a request that has waited for a busy runner waits the delay once more, unless the batch is
    full; `fixed` counts that wait.
    """

    def __init__(self, timeout_ms: float) -> None:
        super().__init__(timeout_ms)
        self._taken_s = 0.0
        """Time at which a free runner found the oldest request."""
        self._oldest_s: float | None = None
        """Arrival time of that request; None: none was found yet."""

    def wait_s(self, opportunity: Opportunity) -> float:
        if self._oldest_s != opportunity.oldest_s:  # a policy is asked only if a runner is free
            self._taken_s, self._oldest_s = opportunity.now_s, opportunity.oldest_s
        return max(0.0, self._taken_s + self._timeout_s - opportunity.now_s)
