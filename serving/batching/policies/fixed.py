"""A policy that waits a fixed time for a batch to fill."""

from __future__ import annotations

from typing import Any

from orchestray.platform.errors import ConfigError
from orchestray.serving.batching.policies.base import Opportunity, Policy


class Fixed(Policy):
    """A policy that runs a batch if it is full or its oldest request has waited `timeout_ms`, as in TensorFlow Serving.

    The time counts from the arrival of the request. One that has already waited that long for a runner is run at once.
    """

    needs_timeout = True

    def __init__(self, timeout_ms: float) -> None:
        if not 0 <= timeout_ms < float("inf"):
            raise ConfigError(f"timeout_ms: must be >= 0 and finite, got {timeout_ms}")
        self._timeout_s = timeout_ms / 1e3

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "timeout_ms": 1e3 * self._timeout_s}

    def wait_s(self, opportunity: Opportunity) -> float:
        return max(0.0, opportunity.oldest_s + self._timeout_s - opportunity.now_s)
