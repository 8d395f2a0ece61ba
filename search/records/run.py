"""Reading a search back."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import RunNameError
from orchestray.platform.run.metrics import read_lines, read_metrics
from orchestray.platform.run.recorded import Recorded
from orchestray.search.records.paths import SearchPaths, is_search

if TYPE_CHECKING:
    import pyarrow as pa

    from orchestray.platform.config.search.schema import SearchConfig
    from orchestray.platform.run.load import Run


class SearchRun(Recorded):
    """A search's directory, read: finished, under way, or cut short."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._paths = SearchPaths(path)

    @cached_property
    def config(self) -> SearchConfig:
        """The config as it was resolved."""
        from orchestray.platform.config.search.load import load_search_config

        return load_search_config(self._paths.config, look_at_task=False)

    def trials(self) -> pa.Table:
        """`trials.jsonl`: a row a trial, a column a key; what is no number or text is in columns of structs."""
        return read_metrics(self._paths.trials)

    def reports(self) -> pa.Table:
        """`reports.jsonl`: a row a report of a trial: `trial, step, time_s, metrics`."""
        return read_metrics(self._paths.reports)

    def lines(self) -> list[dict[str, Any]]:
        """`trials.jsonl` as it is written."""
        return read_lines(self._paths.trials)

    def lineage(self) -> list[dict[str, Any]]:
        """The nodes of `lineage.json`."""
        return read_lines(self._paths.lineage_log)

    @property
    def best(self) -> Run:
        """The best trial as a run.

        Raises:
            RunNameError: the search has none (yet).
        """
        from orchestray.platform.run.load import load_run

        if not (self._paths.best / "config.yaml").is_file():
            raise RunNameError(f"the search in {self.path} has no best run: it is {self.status}")
        return load_run(self._paths.best)


def load_search(path: str | os.PathLike[str]) -> SearchRun:
    """The search in the directory `path`.

    Raises:
        RunNameError: there is none.
    """
    if not is_search(path):
        raise RunNameError(f"there is no search in {os.fspath(path)}: wanted a directory with a trials.jsonl")
    return SearchRun(Path(path).absolute())
