"""Search over hyper-parameters and architectures, on Ray Tune.

The package can be called: `orchestray.search("search.yaml")` is `orchestray.search.api.search`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestray.search.results.run import SearchRun
    from orchestray.search.tune.scheduler import tune_scheduler
    from orchestray.search.tune.searcher import tune_searcher
    from orchestray.search.tune.trainable import trainable

__all__ = ["trainable", "tune_scheduler", "tune_searcher"]

_HOMES = {
    "trainable": "orchestray.search.tune.trainable",
    "tune_scheduler": "orchestray.search.tune.scheduler",
    "tune_searcher": "orchestray.search.tune.searcher",
}

if __name__ != "orchestray.search":
    raise ImportError("import orchestray.search, not search: under the bare name its modules would be loaded twice")


class _CallableModule(ModuleType):
    """A package that can also be called by its name: users may expect to import from it as well as to call it."""

    def __call__(self, source: Any, **settings: Any) -> SearchRun:
        """Run a search; see `orchestray.search.api.search` for the arguments."""
        from orchestray.search.api import search

        return search(source, **settings)


def __getattr__(name: str) -> Any:
    """Return what a user's own `tune.Tuner` takes from here; Ray is imported on first access."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'orchestray.search' has no attribute {name!r}")


sys.modules[__name__].__class__ = _CallableModule
