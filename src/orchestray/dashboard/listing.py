"""The runs and searches in a directory, with a summary line for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from orchestray.dashboard.follow import LogFollower, signature_of
from orchestray.platform.errors import OrchestrayError
from orchestray.platform.report.run_reader import read_status
from orchestray.platform.run.directory import RunPaths, is_live, read_result
from orchestray.platform.run.metrics import read_lines
from orchestray.search.results.figures import Goal
from orchestray.search.results.paths import SearchPaths
from orchestray.trainers.saved.run import summarize

Kind = Literal["run", "search"]

_LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_MARKS = ("config.yaml", "result.json", "metrics.jsonl", "trials.jsonl", ".lock")
"""Files that mark a folder as a run or a search, even an unfinished one."""


@dataclass(frozen=True)
class Entry:
    """An existing run or search."""

    name: str
    kind: Kind
    path: Path


class Library:
    """The runs and searches below one directory; names are looked up in its listing, never turned into paths."""

    def __init__(self, runs_dir: Path) -> None:
        self.runs_dir = runs_dir

    def entries(self) -> dict[str, Entry]:
        """Return the runs and searches that exist now, by name."""
        try:
            folders = sorted(folder for folder in self.runs_dir.iterdir() if not folder.name.startswith("."))
        except OSError:
            return {}
        found = {}
        for folder in folders:
            names = _names_in(folder)
            if not names.isdisjoint(_MARKS):
                kind: Kind = "search" if "trials.jsonl" in names else "run"
                found[folder.name] = Entry(folder.name, kind, folder)
        return found

    def find(self, name: str, kind: Kind) -> Entry | None:
        """Return the run or search with this name; `NAME/best` is the best run of the search NAME."""
        entries = self.entries()
        entry = entries.get(name)
        if entry is None and kind == "run" and name.endswith("/best"):
            search = entries.get(name.removesuffix("/best"))
            if search is not None and search.kind == "search" and (search.path / "best" / "config.yaml").is_file():
                return Entry(name, "run", search.path / "best")
        return entry if entry is not None and entry.kind == kind else None


def _names_in(folder: Path) -> set[str]:
    try:
        return {entry.name for entry in folder.iterdir()}
    except OSError:
        return set()


def status_of(path: Path) -> str:
    """Return `succeeded`, `failed`, `interrupted`, `running`, `died`, or `damaged` if `result.json` cannot be read."""
    try:
        return read_status(path)
    except OrchestrayError:
        return "running" if is_live(path) else "damaged"


class Overview:
    """A summary line for each run and search, updated when its files change."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._cards: dict[str, Card] = {}
        self._rows: dict[str, dict[str, Any]] = {}

    def refresh(self) -> dict[str, Any] | None:
        """Check the files again; return {"changed": [rows], "removed": [names]}, or None if nothing has changed."""
        entries = self._library.entries()
        changed = []
        for name, entry in entries.items():
            card = self._cards.get(name)
            if card is None or card.entry != entry:
                card = self._cards[name] = Card(entry)
            if card.refresh():
                row = card.row()
                if self._rows.get(name) != row:
                    self._rows[name] = row
                    changed.append(row)
        removed = [name for name in self._rows if name not in entries]
        for name in removed:
            del self._rows[name], self._cards[name]
        return {"changed": changed, "removed": removed} if changed or removed else None

    def snapshot(self) -> dict[str, Any]:
        """Return every line: {"runs_dir", "rows"}."""
        self.refresh()
        return {"runs_dir": str(self._library.runs_dir), "rows": list(self._rows.values())}


class Card:
    """The entry of a run or search in the list."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self._paths = SearchPaths(entry.path)
        self._trials = LogFollower(self._paths.trials)
        self._num_trials = 0
        self._best: float | None = None
        self._about: dict[str, Any] = {}
        self._config_signature: object = ()
        self._signature: object = ()

    def refresh(self) -> bool:
        """Return True if anything has changed since the last call."""
        path = self.entry.path
        result = signature_of(path / "result.json")
        # The files of a run without a result do not show whether it is alive; its lock does.
        live = result is None and is_live(path)
        log = "trials.jsonl" if self.entry.kind == "search" else "metrics.jsonl"
        signature = (result, live, signature_of(path / log), signature_of(path / "config.yaml"))
        if signature == self._signature:
            return False
        self._signature = signature
        if signature[3] != self._config_signature or self._about.get("total") is None:
            self._config_signature = signature[3]
            self._about = about(path, self.entry.kind)
        return True

    def row(self) -> dict[str, Any]:
        """Return the line, as JSON values."""
        return self._search_row() if self.entry.kind == "search" else self._run_row()

    def _run_row(self) -> dict[str, Any]:
        summary = summarize(self.entry.path)
        status = "running" if summary.status == "damaged" and is_live(self.entry.path) else summary.status
        metric = next(((name, value) for name, value in summary.metrics.items() if value is not None), (None, None))
        if metric[0] is None and summary.loss is not None:
            metric = ("train loss", summary.loss)
        return {
            "name": self.entry.name,
            "kind": "run",
            "status": status,
            "about": self._about.get("text", ""),
            "done": summary.steps,
            "total": self._about.get("total"),
            "metric": metric[0],
            "value": metric[1],
            "seconds": summary.seconds,
            "started_at": summary.started_at,
        }

    def _search_row(self) -> dict[str, Any]:
        goal = self._about.get("goal") or Goal("objective", "max")
        fresh = self._trials.read()
        if fresh.is_reset:
            self._num_trials, self._best = 0, None
        self._num_trials += len(fresh.lines)
        values = [line["objective"] for line in fresh.lines if is_judged(line)]
        values += [] if self._best is None else [self._best]
        self._best = max(values, key=lambda value: goal.sign * value, default=None)
        try:
            result = read_result(RunPaths(self.entry.path)) or {}
        except OrchestrayError:
            result = {}
        return {
            "name": self.entry.name,
            "kind": "search",
            "status": status_of(self.entry.path),
            "about": self._about.get("text", ""),
            "done": self._num_trials,
            "total": self._about.get("total"),
            "metric": f"best {goal.metric}",
            "value": self._best,
            "seconds": result.get("seconds"),
            "started_at": _modified_at(self.entry.path / ".lock"),
        }


def is_judged(line: Mapping[str, Any]) -> bool:
    """Return True if a trial's line has a valid objective."""
    return isinstance(line.get("objective"), int | float) and line.get("status") != "failed"


def about(path: Path, kind: Kind) -> dict[str, Any]:
    """Return a config in a few words: {"text", "total", "goal" of a search}; empty if it cannot be read."""
    config = read_yaml(path / "config.yaml")
    if kind == "search":
        search = part(config, "search")
        total = part(search, "budget").get("trials")
        words = [part(search, "method").get("type"), part(part(config, "base"), "task").get("type")]
        return {"text": _joined(words), "total": total, "goal": goals_of(config)[0]}
    words = [part(config, "task").get("type"), part(part(config, "strategy"), "exchange").get("type")]
    return {"text": _joined(words), "total": _total_steps(path / "events.jsonl")}


def read_yaml(path: Path) -> dict[str, Any]:
    """Return a config as written, unchecked, so that other versions are shown too; empty if it is not a mapping."""
    try:
        value = yaml.load(path.read_bytes(), Loader=_LOADER)  # noqa: S506 - it is a safe one
    except (OSError, yaml.YAMLError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def yaml_problem(text: str | None) -> str | None:
    """Return the problem of a config's text, or None."""
    if text is None:
        return None
    try:
        is_mapping = isinstance(yaml.load(text, Loader=_LOADER), dict)  # noqa: S506 - it is a safe one
    except (yaml.YAMLError, ValueError):
        is_mapping = False
    return None if is_mapping else "config.yaml is damaged: it is no YAML mapping"


def part(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a mapping within a mapping; empty if there is none."""
    value = config.get(name)
    return value if isinstance(value, dict) else {}


def goals_of(config: Mapping[str, Any]) -> list[Goal]:
    """Return the objectives of a search's config, at least one."""
    objectives = part(config, "search").get("objective")
    listed = objectives if isinstance(objectives, list) else [objectives]
    goals = [
        Goal(str(each["metric"]), "min" if each.get("mode") == "min" else "max")
        for each in listed
        if isinstance(each, dict) and "metric" in each
    ]
    return goals or [Goal("objective", "max")]


def _joined(words: list[Any]) -> str:
    return " · ".join(str(word).rpartition(":")[2] for word in words if word)


def _total_steps(events: Path) -> int | None:
    """Return the planned number of steps of the run, from the event of its (last) start."""
    try:
        lines = read_lines(events)
    except OrchestrayError:
        return None
    totals = [line["total_steps"] for line in lines if isinstance(line.get("total_steps"), int)]
    return totals[-1] if totals else None


def _modified_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
