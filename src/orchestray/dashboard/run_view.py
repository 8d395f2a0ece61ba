"""A run's page, updated while the run goes on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from orchestray.dashboard.follow import Fresh, JsonFile, LogFollower, SmallFile
from orchestray.dashboard.listing import Entry, part, read_yaml, yaml_problem
from orchestray.dashboard.series import Series
from orchestray.platform.run.directory import RunPaths, is_live

_MAX_EVENTS = 500
_PLACES = {"step", "epoch", "time_s", "split"}
_NEW_POINTS = 400
"""Largest number of new points of a metric in one message."""


class RunView:
    """A reader of the growing files of a run, for one thread at a time."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        paths = RunPaths(entry.path)
        self._metrics = LogFollower(paths.metrics)
        self._events = LogFollower(paths.events)
        self._result = JsonFile(paths.result)
        self._actors = JsonFile(paths.actors)
        self._config = SmallFile(paths.config)
        self._series: dict[str, dict[str, Series]] = {}
        self._event_lines: list[dict[str, Any]] = []
        self._num_events = 0
        self._staleness: Counter[int] = Counter()
        self._last: dict[str, Any] = {}
        self._total_steps: int | None = None
        self._raw: dict[str, Any] = {}
        self._config_problem: str | None = None
        self._head: dict[str, Any] = {}

    def refresh(self) -> dict[str, Any] | None:
        """Read the changes, and return a message about them, or None if there are none."""
        before = {split: {key: len(series.x) for key, series in each.items()} for split, each in self._series.items()}
        metrics, events = self._metrics.read(), self._events.read()
        changed = {name for name, file in self._files() if file.read()}
        if "config" in changed:
            self._raw = read_yaml(self._entry.path / "config.yaml")
            self._config_problem = yaml_problem(self._config.text)
        if metrics.is_reset or events.is_reset:
            self._take_again(metrics, events)
            return {"reset": self.snapshot(refresh=False)}
        self._take_metrics(metrics.lines)
        new_events = self._take_events(events.lines)
        head = self._make_head()
        message: dict[str, Any] = {}
        if metrics.lines:
            message["points"] = self._points(before, _NEW_POINTS)
            message["staleness"] = self._histogram()
        if new_events:
            message["events"] = new_events[-_MAX_EVENTS:]
        if changed & {"actors", "result"}:
            message["workers"] = self._workers()
        if "config" in changed:
            message["config"] = self._config.text
        if head != self._head:
            self._head = head
            message["head"] = head
        return message or None

    def snapshot(self, *, refresh: bool = True) -> dict[str, Any]:
        """Return everything that the page shows."""
        if refresh:
            self.refresh()
        return {
            "name": self._entry.name,
            "path": str(self._entry.path),
            "head": self._make_head(),
            "points": self._points({}, None),
            "events": self._event_lines,
            "num_events": self._num_events,
            "workers": self._workers(),
            "staleness": self._histogram(),
            "config": self._config.text,
        }

    def _files(self) -> list[tuple[str, JsonFile | SmallFile]]:
        return [("result", self._result), ("actors", self._actors), ("config", self._config)]

    def _take_again(self, metrics: Fresh, events: Fresh) -> None:
        """Read the rewritten log, or both, from the beginning."""
        if metrics.is_reset:
            self._series, self._last = {}, {}
            self._staleness.clear()
        if events.is_reset:
            self._event_lines, self._num_events = [], 0
        self._take_metrics(metrics.lines)
        self._take_events(events.lines)

    def _take_metrics(self, lines: Iterable[Mapping[str, Any]]) -> None:
        for line in lines:
            step = line.get("step")
            if not isinstance(step, int | float) or isinstance(step, bool):
                continue
            split = str(line.get("split", "train"))
            series = self._series.setdefault(split, {})
            for key, value in line.items():
                if key not in _PLACES and (value is None or isinstance(value, int | float)):
                    found = series.get(key)
                    if found is None:
                        found = series[key] = Series()
                    found.append(step, value)
            self._last[split] = line
            if isinstance(line.get("staleness"), int):
                self._staleness[line["staleness"]] += 1

    def _take_events(self, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for line in lines:
            if isinstance(line.get("total_steps"), int):
                self._total_steps = line["total_steps"]
        self._num_events += len(lines)
        self._event_lines = [*self._event_lines, *lines][-_MAX_EVENTS:]
        return lines

    def _points(self, before: Mapping[str, Mapping[str, int]], max_points: int | None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for split, series in self._series.items():
            for key, each in series.items():
                start = before.get(split, {}).get(key, 0)
                if start < len(each.x):
                    points = each.points(start) if max_points is None else each.points(start, max_points)
                    found.setdefault(split, {})[key] = points
        return found

    def _histogram(self) -> list[list[int]]:
        """Return the number of updates with each staleness, from the result if possible, else from the steps so far."""
        histogram = part(part(self._result_value(), "staleness"), "histogram")
        if histogram:
            return sorted([int(key), int(count)] for key, count in histogram.items() if str(key).isdigit())
        return [[key, count] for key, count in sorted(self._staleness.items())]

    def _result_value(self) -> dict[str, Any]:
        return self._result.value if isinstance(self._result.value, dict) else {}

    def _make_head(self) -> dict[str, Any]:
        result, train = self._result_value(), self._last.get("train", {})
        validation = self._last.get("validation", {})
        final = part(result, "final")
        losses = part(final, "train") or train
        return {
            "status": self._status(),
            "step": result.get("steps") or train.get("step"),
            "total_steps": self._total_steps,
            "epoch": train.get("epoch"),
            "seconds": result.get("seconds") or train.get("time_s"),
            "loss": losses.get("loss"),
            "validation": {
                key: value
                for key, value in (part(final, "validation") or validation).items()
                if key not in _PLACES and isinstance(value, int | float)
            },
            "samples_per_s": result.get("samples_per_s") or self._recent_speed(),
            "bytes": part(result, "bytes"),
            "bubble": result.get("bubble"),
            "restarts": result.get("restarts"),
            "goodput": result.get("goodput"),
            "error": result.get("error"),
            "task": part(self._raw, "task").get("type"),
            "exchange": part(part(self._raw, "strategy"), "exchange").get("type"),
            "network": part(part(self._raw, "strategy"), "network"),
            "problems": self._problems(),
        }

    def _status(self) -> str:
        result = self._result_value()
        if result:
            return str(result.get("status"))
        if is_live(self._entry.path):
            return "running"
        return "damaged" if self._result.problem else "died"

    def _recent_speed(self) -> float | None:
        speeds = self._series.get("train", {}).get("samples_per_s")
        if speeds is None:
            return None
        recent = sorted(filter(math.isfinite, speeds.y[-50:]))
        return recent[len(recent) // 2] if recent else None

    def _problems(self) -> list[str]:
        problems = [file.problem for _, file in self._files() if file.problem]
        if self._config_problem:
            problems.append(self._config_problem)
        if self._config.text is None and not self._config.problem:
            problems.append("config.yaml is missing: the run ended before it began, or is just beginning")
        problems += [
            f"{log.path.name}: {log.num_broken:,} {'line is' if log.num_broken == 1 else 'lines are'} no JSON, left out"
            for log in (self._metrics, self._events)
            if log.num_broken
        ]
        return problems

    def _workers(self) -> list[dict[str, Any]]:
        """Return one row per process: the live ones, with the result's numbers for each worker."""
        actors = self._actors.value if isinstance(self._actors.value, list) else []
        rows = {
            (str(actor.get("role")), actor.get("rank")): {
                **{key: actor.get(key) for key in ("role", "rank", "pid", "node")},
                "is_live": True,
            }
            for actor in actors
            if isinstance(actor, dict)
        }
        result = self._result_value()
        workers = result.get("workers")
        for rank, worker in enumerate(workers if isinstance(workers, list) else []):
            row = rows.setdefault(("worker", rank), {"role": "worker", "rank": rank, "is_live": False})
            if isinstance(worker, dict):
                row.update({key: value for key, value in worker.items() if isinstance(value, int | float)})
        for event in self._event_lines:
            if event.get("event") == "worker_started":
                place = (str(event.get("role")), event.get("rank"))
                row = rows.setdefault(place, {"role": place[0], "rank": place[1], "is_live": False})
                row.setdefault("node", event.get("node"))
        peaks = part(result, "memory").get("peak_bytes")
        in_order = sorted(rows, key=lambda place: (place[0] != "worker", place[0], _number(place[1])))
        for index, place in enumerate(in_order):
            if isinstance(peaks, list) and len(peaks) == len(in_order):
                rows[place]["peak_bytes"] = peaks[index]
        return [rows[place] for place in in_order]


def _number(rank: object) -> float:
    return rank if isinstance(rank, int) else -1
