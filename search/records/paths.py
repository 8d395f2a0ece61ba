"""Where things are in a search's directory."""

from __future__ import annotations

import os
from pathlib import Path


class SearchPaths:
    """`<runs-dir>/<name>/` of a search."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.trials = self.path / "trials.jsonl"
        """A line a trial that has ended."""
        self.reports = self.path / "reports.jsonl"
        """A line a report of a trial: its learning curve. Of a trial that was begun again, the last line of a step
        counts."""
        self.lineage = self.path / "lineage.json"
        self.lineage_log = self.path / "lineage.jsonl"
        """The nodes of `lineage.json` as they came."""
        self.journal = self.path / "journal.jsonl"
        """The calls made to the method, with their answers."""
        self.result = self.path / "result.json"
        self.pareto = self.path / "pareto.json"
        self.best = self.path / "best"
        """A run directory."""
        self.report = self.path / "report.html"
        self.tensorboard = self.path / "tensorboard"
        self.trial_states = self.path / "states"
        """What the engine keeps of trials that are under way."""


def is_search(path: str | os.PathLike[str]) -> bool:
    """Whether a directory is a search's."""
    paths = SearchPaths(path)
    return paths.config.is_file() and paths.trials.is_file()
