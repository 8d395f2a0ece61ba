"""Batching that tunes itself: pure asyncio, for any function on batches, here or in an application of one's own."""

from __future__ import annotations

from orchestray.serving.batching.batcher import OBJECTIVES, Batcher
from orchestray.serving.batching.errors import (
    BatcherClosedError,
    BatchFunctionError,
    BatchingError,
    DeadlineError,
    QueueFullError,
    RunnerLostError,
    RunTimeoutError,
)
from orchestray.serving.batching.listener import BatcherStats, BatchListener
from orchestray.serving.batching.policies import POLICIES, Adaptive, Fixed, Greedy, Policy, make_policy
from orchestray.serving.batching.runner import RunnerHandle

__all__ = [
    "OBJECTIVES",
    "POLICIES",
    "Adaptive",
    "BatchFunctionError",
    "BatchListener",
    "Batcher",
    "BatcherClosedError",
    "BatcherStats",
    "BatchingError",
    "DeadlineError",
    "Fixed",
    "Greedy",
    "Policy",
    "QueueFullError",
    "RunTimeoutError",
    "RunnerHandle",
    "RunnerLostError",
    "make_policy",
]
