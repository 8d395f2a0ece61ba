"""Search over hyper-parameters and architectures, on Ray Tune.

The package can be called: `orchestray.search("search.yaml")` is `orchestray.search.api.search`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestray.search.engine.scheduler import tune_scheduler
    from orchestray.search.engine.searcher import tune_searcher
    from orchestray.search.records.run import SearchRun

__all__ = ["tune_scheduler", "tune_searcher"]

if __name__ != "orchestray.search":
    raise ImportError("import orchestray.search, not search: under the bare name its modules would be loaded twice")


class _CallableModule(ModuleType):
    """A package with the name of what it does: importing from it and calling it are both what a user would expect."""

    def __call__(self, source: Any, **settings: Any) -> SearchRun:
        """As `orchestray.search.api.search`, which says what it takes."""
        from orchestray.search.api import search

        return search(source, **settings)


def __getattr__(name: str) -> Any:
    """What a user's own `tune.Tuner` takes; Ray is imported when it is asked for."""
    if name == "tune_searcher":
        from orchestray.search.engine.searcher import tune_searcher

        return tune_searcher
    if name == "tune_scheduler":
        from orchestray.search.engine.scheduler import tune_scheduler

        return tune_scheduler
    raise AttributeError(f"module 'orchestray.search' has no attribute {name!r}")


sys.modules[__name__].__class__ = _CallableModule
