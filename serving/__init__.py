"""Serving of trained models over HTTP, on Ray Serve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if __name__ != "orchestray.serving":
    raise ImportError("import orchestray.serving, not serving: under the bare name its modules would be loaded twice")

if TYPE_CHECKING:
    from orchestray.serving.application.build import app

__all__ = ["app"]


def __getattr__(name: str) -> Any:
    """Return what a user's own Serve application takes from here; Ray is imported on first access."""
    if name == "app":
        from orchestray.serving.application.build import app

        return app
    raise AttributeError(f"module 'orchestray.serving' has no attribute {name!r}")
