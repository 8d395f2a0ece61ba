"""A reader of a search's directory."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import RunNameError
from orchestray.platform.report.run_reader import Recorded
from orchestray.platform.run.metrics import read_lines, read_metrics
from orchestray.search.results.paths import SearchPaths, is_search
from orchestray.search.results.tune_results import result_grid

if TYPE_CHECKING:
    import pyarrow as pa
    from ray.tune import ResultGrid

    from orchestray.search.config.schema import SearchConfig
    from orchestray.trainers.saved.run import Run


class SearchRun(Recorded):
    """A search read from its directory: finished, still running, or cut short."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._paths = SearchPaths(path)

    @cached_property
    def config(self) -> SearchConfig:
        """Resolved config of the search."""
        from orchestray.search.config.load import load_search_config

        return load_search_config(self._paths.config, look_at_task=False)

    def trials(self) -> pa.Table:
        """Return `trials.jsonl` with one row per trial and one column per key; nested values are columns of structs."""
        return read_metrics(self._paths.trials)

    def reports(self) -> pa.Table:
        """Return `reports.jsonl` with one row per report of a trial: `trial, step, time_s, metrics`."""
        return read_metrics(self._paths.reports)

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of `trials.jsonl` as they are written."""
        return read_lines(self._paths.trials)

    def lineage(self) -> list[dict[str, Any]]:
        """Return the nodes of `lineage.json`."""
        return read_lines(self._paths.lineage_log)

    @property
    def results(self) -> ResultGrid:
        """Results of Ray Tune, one for each trial; of one that was resumed, those of its last attempt.

        Raises:
            RunNameError: no trial has begun.
        """
        return result_grid(self._paths.tune, self.config.search.objective[0])

    @property
    def best(self) -> Run:
        """The best trial as a run.

        Raises:
            RunNameError: the search has no best run (yet).
        """
        from orchestray.trainers.saved.run import load_run

        if not (self._paths.best / "config.yaml").is_file():
            raise RunNameError(f"the search in {self.path} has no best run: it is {self.status}")
        return load_run(self._paths.best)


def load_search(path: str | os.PathLike[str]) -> SearchRun:
    """Return the search in the directory `path`.

    Raises:
        RunNameError: the directory does not hold a search.
    """
    if not is_search(path):
        raise RunNameError(f"there is no search in {os.fspath(path)}: wanted a directory with a trials.jsonl")
    return SearchRun(Path(path).absolute())
