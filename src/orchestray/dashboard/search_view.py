"""A search's page, updated while the search goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from orchestray.dashboard.follow import Fresh, JsonFile, LogFollower, SmallFile
from orchestray.dashboard.listing import Entry, goals_of, part, read_yaml, yaml_problem
from orchestray.dashboard.networks import NetworkPictures, ancestors
from orchestray.dashboard.series import thinned
from orchestray.platform.run.directory import is_live
from orchestray.search.results.figures import Goal, all_figures, best_line, cell, trial_table
from orchestray.search.results.importance import importance
from orchestray.search.results.paths import SearchPaths
from orchestray.search.results.schema import is_untrained

_MAX_CURVE_POINTS = 200
_MAX_KEYS = 12
"""Number of keys whose importance is shown."""
_MEASURES = ("parameters", "flops", "latency_ms")
"""Measures of a searched network that are shown."""


class SearchView:
    """A reader of the growing files of a search, for one thread at a time."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._paths = SearchPaths(entry.path)
        self._trials = LogFollower(self._paths.trials)
        self._reports = LogFollower(self._paths.reports)
        self._lineage = LogFollower(self._paths.lineage_log)
        self._result = JsonFile(self._paths.result)
        self._config = SmallFile(self._paths.config)
        self._best_config = SmallFile(self._paths.best / "config.yaml")
        self._forget()
        self._raw: dict[str, Any] = {}
        self._config_problem: str | None = None
        self._goals: list[Goal] = [Goal("objective", "max")]
        self._log_keys: list[str] = []
        self._pictures = NetworkPictures({})
        self._head: dict[str, Any] = {}
        self._figures: tuple[int, dict[str, Any]] | None = None
        self._importance: tuple[int, list[dict[str, Any]]] | None = None
        self.revision = 0
        """Number that grows whenever a figure would look different."""

    def _forget(self) -> None:
        self._lines: dict[int, dict[str, Any]] = {}
        self._report_lines: list[dict[str, Any]] = []
        self._last_report_s: float | None = None
        """Time of the last report, in seconds of the search."""
        self._last_reports: dict[int, dict[str, Any]] = {}
        self._configs: dict[int, Any] = {}
        self._nodes: list[dict[str, Any]] = []
        self._sent: tuple[list[str], int] = ([], 0)

    def refresh(self) -> dict[str, Any] | None:
        """Read the changes, and return a message about them, or None if there are none."""
        if self._config.read():
            self._raw = read_yaml(self._paths.config)
            self._config_problem = yaml_problem(self._config.text)
            self._goals = goals_of(self._raw)
            space = part(part(self._raw, "search"), "space")
            self._log_keys = [key for key in space if str(part(space, key).get("type")).startswith("log_")]
            self._pictures = NetworkPictures(part(part(self._raw, "search"), "architecture"))
            self.revision += 1
        logs = [log.read() for log in (self._trials, self._reports, self._lineage)]
        if any(log.is_reset for log in logs):
            logs = self._read_again()
        self._result.read()
        self._best_config.read()
        for fresh, take in zip(logs, (self._take_trial, self._take_report, self._take_node), strict=True):
            for line in fresh.lines:
                take(line)
        if any(fresh.lines for fresh in logs):
            self.revision += 1
        head = self._make_head()
        if head == self._head:
            return None
        self._head = head
        return {"head": head, "table": self._new_rows(), "running": self._running_rows()}

    def snapshot(self) -> dict[str, Any]:
        """Return the data that the page shows first; `figures` are requested separately, as they take longer."""
        self.refresh()
        self._head = self._make_head()
        table = trial_table(self._lines.values())
        self._sent = (table["columns"], len(self._lines))
        return {
            "name": self._entry.name,
            "path": str(self._entry.path),
            "head": self._head,
            "table": {**table, "is_whole": True},
            "running": self._running_rows(),
            "has_report": self._paths.report.is_file(),
            "config": self._config.text,
        }

    def figures(self) -> dict[str, Any]:
        """Return the data of the figures for the trials so far; computed once for all pages."""
        if self._figures is None or self._figures[0] != self.revision:
            lines = list(self._lines.values())
            figures = all_figures(lines, self._report_lines, self._nodes, self._goals, self._log_keys)
            del figures["table"]
            for curve in figures["curves"]["curves"]:
                curve |= thinned_curve(curve)
            figures["copies"] = self._copies()
            figures["revision"] = self.revision
            self._figures = (self.revision, figures)
        return self._figures[1]

    def importance(self) -> Callable[[], dict[str, Any]]:
        """Return a function that computes the importance of each key apart from the view, as it may take seconds."""
        lines = list(self._lines.values())
        goal, log_keys, known = self._goals[0], list(self._log_keys), self._importance

        def find() -> dict[str, Any]:
            found = known[1] if known is not None and known[0] == len(lines) else importance(lines, goal, log_keys)
            self._importance = (len(lines), found)
            return {"importance": found[:_MAX_KEYS]}

        return find

    def trial(self, number: int) -> dict[str, Any] | None:
        """Return the details of a trial: its line, its network as a picture, and its ancestors."""
        line = self._lines.get(number) or self._running_line(number)
        if line is None:
            return None
        family = ancestors(number, self._nodes)
        return {"line": line, "network": self._pictures.svg(line), "ancestors": [self._relative(at) for at in family]}

    def _relative(self, number: int) -> dict[str, Any]:
        line = self._lines.get(number) or self._running_line(number) or {}
        node = next((node for node in self._nodes if node.get("trial") == number), {})
        return {
            "trial": number,
            "objective": line.get("objective"),
            "change": str(line.get("change") or node.get("change") or ""),
            "network": self._pictures.svg(line) or self._pictures.svg(node),
        }

    def _read_again(self) -> list[Fresh]:
        """Read all logs from the beginning, because one was rewritten."""
        self._forget()
        for log in (self._trials, self._reports, self._lineage):
            log.rewind()
        self.revision += 1
        return [log.read() for log in (self._trials, self._reports, self._lineage)]

    def _take_trial(self, line: dict[str, Any]) -> None:
        if _is_number(line.get("trial")):
            objective = line.get("objective")
            known = {
                "status": "unknown",
                **line,
                "trial": int(line["trial"]),
                "objective": objective if _is_number(objective) else None,
                "config": part(line, "config"),
                "objectives": {key: value for key, value in part(line, "objectives").items() if _is_number(value)},
            }
            self._lines.setdefault(known["trial"], known)

    def _take_report(self, line: dict[str, Any]) -> None:
        if not _is_number(line.get("trial")) or not _is_number(line.get("step")):
            return
        trial = int(line["trial"])
        metrics = {key: value for key, value in part(line, "metrics").items() if _is_number(value)}
        kept: dict[str, Any] = {"trial": trial, "step": int(line["step"]), "metrics": metrics}
        config = line.get("config")
        if isinstance(config, dict):
            if self._configs.get(trial) != config:
                self._configs[trial] = config
            kept["config"] = self._configs[trial]  # the same object for many reports saves memory
        self._report_lines.append(kept)
        if _is_number(time_s := line.get("time_s")):
            self._last_report_s = float(time_s)  # type: ignore[arg-type]  # a number
        self._last_reports[trial] = kept

    def _take_node(self, line: dict[str, Any]) -> None:
        if _is_number(line.get("trial")) and _is_number(line.get("step")):
            parent = line.get("parent")
            self._nodes.append({**line, "parent": parent if isinstance(parent, int) else None})
            if isinstance(line.get("config"), dict):
                self._configs.setdefault(int(line["trial"]), line["config"])

    def _new_rows(self) -> dict[str, Any]:
        """Return the rows that the page lacks, or all if the columns have changed."""
        table = trial_table(self._lines.values())
        columns, num_sent = self._sent
        is_whole = columns != table["columns"] or num_sent > len(table["rows"])
        self._sent = (table["columns"], len(table["rows"]))
        return {**table, "rows": table["rows"] if is_whole else table["rows"][num_sent:], "is_whole": is_whole}

    def _running_rows(self) -> list[dict[str, Any]]:
        """Return the trials that have begun and not ended, while the search is running."""
        if self._status() != "running":
            return []
        begun = dict.fromkeys([*(int(node["trial"]) for node in self._nodes), *self._last_reports])
        return [self._shown(self._running_line(trial)) for trial in begun if trial not in self._lines]

    @staticmethod
    def _shown(line: Mapping[str, Any] | None) -> dict[str, Any]:
        values = {**(line or {}), **((line or {}).get("config") or {})}
        return {key: cell(value) for key, value in values.items() if key != "config"}

    def _running_line(self, number: int) -> dict[str, Any] | None:
        node: dict[str, Any] = next((node for node in reversed(self._nodes) if node.get("trial") == number), {})
        report = self._last_reports.get(number, {})
        if not node and not report:
            return None
        return {
            "trial": number,
            "status": "running" if self._status() == "running" else "unfinished",
            "objective": part(report, "metrics").get(self._goals[0].metric),
            "config": report.get("config") or node.get("config") or {},
            "steps": report.get("step"),
            **({"genome": node["genome"]} if "genome" in node else {}),
            "change": node.get("change", ""),
        }

    def _copies(self) -> list[dict[str, Any]]:
        """Return when members of a population continued from another's weights: [{"trial", "step", "parent"}]."""
        return [
            {"trial": int(node["trial"]), "step": int(node["step"]), "parent": int(node["parent"])}
            for node in self._nodes
            if _is_number(node.get("parent")) and node["step"] > 0
        ]

    def _status(self) -> str:
        result = self._result.value if isinstance(self._result.value, dict) else {}
        if result:
            return str(result.get("status"))
        if is_live(self._entry.path):
            return "running"
        return "damaged" if self._result.problem else "died"

    def _make_head(self) -> dict[str, Any]:
        result = self._result.value if isinstance(self._result.value, dict) else {}
        search = part(self._raw, "search")
        best = best_line(self._lines.values(), self._goals[0])
        counts: dict[str, int] = {}
        for line in self._lines.values():
            status = "over a bound, not trained" if is_untrained(line) else str(line["status"])
            counts[status] = counts.get(status, 0) + 1
        architecture = part(search, "architecture").get("space")
        said = part(result, "best").get("trial")
        if isinstance(said, int) and said in self._lines:
            best = self._lines[said]  # by the states that are left, which only the search itself knows
        return {
            "status": self._status(),
            "method": part(search, "method").get("type"),
            "task": part(part(self._raw, "base"), "task").get("type"),
            "goals": [{"metric": goal.metric, "mode": goal.mode} for goal in self._goals],
            "keys": list(part(search, "space")),
            "architecture": str(architecture).rpartition("/")[2] if architecture else None,
            "trials": len(self._lines),
            "total": part(search, "budget").get("trials"),
            "counts": counts,
            "best_trial": best["trial"] if best else None,
            "best": self._best_values(best),
            "best_config": self._best_config.text,
            "seconds": result.get("seconds", self._last_report_s),
            "steps": sum(line["steps"] for line in self._lines.values() if _is_number(line.get("steps"))),
            "error": result.get("error"),
            "problems": self._problems(),
            "revision": self.revision,
        }

    def _best_values(self, best: Mapping[str, Any] | None) -> dict[str, Any] | None:
        if best is None:
            return None
        genome = best.get("genome")
        result = part(self._result.value, "best") if isinstance(self._result.value, dict) else {}
        at, said = result.get("trial"), result.get("network")  # only the search can describe users' networks
        return {
            "objective": best["objective"],
            "config": best.get("best_config") or best.get("config") or {},
            "network": self._pictures.text(genome) or (said if best["trial"] == at else None) or _shown(genome),
            "measures": {name: best[name] for name in _MEASURES if best.get(name) is not None},
        }

    def _problems(self) -> list[str]:
        files = (self._result, self._config, self._best_config)
        problems = [problem for problem in (*(file.problem for file in files), self._config_problem) if problem]
        problems += [
            f"{log.path.name}: {log.num_broken:,} {'line is' if log.num_broken == 1 else 'lines are'} no JSON, left out"
            for log in (self._trials, self._reports, self._lineage)
            if log.num_broken
        ]
        return problems


def thinned_curve(curve: Mapping[str, Any]) -> dict[str, Any]:
    """Return `x` and `y` of a learning curve, with few enough points for a page that draws hundreds of curves."""
    import numpy as np

    return thinned(np.asarray(curve["x"], dtype=float), np.asarray(curve["y"], dtype=float), _MAX_CURVE_POINTS)


def _shown(genome: Any) -> str | None:
    return None if genome is None else json.dumps(genome, indent=1)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
