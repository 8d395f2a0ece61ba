"""Self-tuning batching in pure asyncio, for any function on batches; applications can use it without the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from orchestray.serving.batching.policies import POLICIES, Adaptive, Fixed, Greedy, Policy, Polled, make_policy
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
    "Polled",
    "QueueFullError",
    "RunTimeoutError",
    "RunnerHandle",
    "RunnerLostError",
    "make_policy",
]

_HOMES = {
    "batcher": ("OBJECTIVES", "Batcher"),
    "listener": ("BatchListener", "BatcherStats"),
    "policies": ("POLICIES", "Adaptive", "Fixed", "Greedy", "Policy", "Polled", "make_policy"),
    "runner": ("RunnerHandle",),
}
"""Maps modules to their public names; the others are of `errors`."""


def __getattr__(name: str) -> Any:
    """Load a public name on first access: a config that names a policy needs no event loop."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    home = next((module for module, names in _HOMES.items() if name in names), "errors")
    return getattr(import_module(f"{__name__}.{home}"), name)
