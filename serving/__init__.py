"""Serving of trained models over HTTP, on Ray Serve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if __name__ != "orchestray.serving":
    raise ImportError("import orchestray.serving, not serving: under the bare name its modules would be loaded twice")

if TYPE_CHECKING:
    from orchestray.serving.application.build import app
    from orchestray.serving.batching.decorator import batch

__all__ = ["app", "batch"]


def __getattr__(name: str) -> Any:
    """Return what a user's own Serve application takes from here; Ray is imported on first access."""
    if name == "app":
        from orchestray.serving.application.build import app

        return app
    if name == "batch":
        from orchestray.serving.batching.decorator import batch

        return batch
    raise AttributeError(f"module 'orchestray.serving' has no attribute {name!r}")
