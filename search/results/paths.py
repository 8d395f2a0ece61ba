"""The paths of the files in a search's directory."""

from __future__ import annotations

import os
from pathlib import Path


class SearchPaths:
    """The paths in `<runs-dir>/<name>/` of a search."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.trials = self.path / "trials.jsonl"
        """Log with one line per trial that has ended."""
        self.reports = self.path / "reports.jsonl"
        """Log with one line per report of a trial: its learning curve. If a trial was restarted, the last line of a
        step counts.
        """
        self.lineage = self.path / "lineage.json"
        self.lineage_log = self.path / "lineage.jsonl"
        """Nodes of `lineage.json`, in the order in which they were recorded."""
        self.journal = self.path / "journal.jsonl"
        """Log of the calls made to the method, with their answers."""
        self.elapsed = self.path / "elapsed.json"
        """File with the seconds that all attempts at the search have taken so far."""
        self.result = self.path / "result.json"
        self.pareto = self.path / "pareto.json"
        self.best = self.path / "best"
        """Run directory of the best trial."""
        self.report = self.path / "report.html"
        self.tensorboard = self.path / "tensorboard"
        self.tune = self.path / "tune"
        """Directory of the experiments of Ray Tune: one for each attempt, with a number."""
        self.logs = self.path / "logs"
        """Directory with what each trial has printed."""
        self.trial_states = self.path / "states"
        """Directory in which the engine keeps the states of unfinished trials."""


def is_search(path: str | os.PathLike[str]) -> bool:
    """Return True if a directory is a search's."""
    paths = SearchPaths(path)
    return paths.config.is_file() and paths.trials.is_file()
