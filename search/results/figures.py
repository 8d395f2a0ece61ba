"""The figures of a search as plain data, computed from its lines; the report and the dashboard draw the same ones.

Pure functions from lists and mappings to lists and mappings, independent of how the figures are drawn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Line = Mapping[str, Any]
"""Line of `trials.jsonl` or `reports.jsonl`, or a node of `lineage.json`."""

_MAX_CURVES = 400
_MAX_TEXT = 80
_MAX_GENES = 12
_MAX_TICKS = 8
_MAX_GENE_AXES = 6
_COMMON = 0.8
_MEASURES = ("parameters", "flops", "latency_ms")


@dataclass(frozen=True)
class Goal:
    """An objective, reduced to what the figures need."""

    metric: str
    mode: str

    @property
    def sign(self) -> float:
        """Factor that turns a value into a score, of which more is better."""
        return 1.0 if self.mode == "max" else -1.0


def all_figures(
    lines: Sequence[Line],
    reports: Sequence[Line],
    nodes: Sequence[Line],
    goals: Sequence[Goal],
    log_keys: Iterable[str] = (),
) -> dict[str, Any]:
    """Return everything that a page about a search draws, except the importance of its keys, which takes longer.

    Args:
        lines: lines of `trials.jsonl`, in the order in which trials ended.
        reports: lines of `reports.jsonl`.
        nodes: nodes of `lineage.json`.
        goals: the objectives, the first of which ranks the trials.
        log_keys: keys searched on a logarithmic scale.
    """
    return {
        "goals": [{"metric": goal.metric, "mode": goal.mode} for goal in goals],
        "table": trial_table(lines),
        "best_so_far": best_so_far(lines, goals[0]),
        "curves": learning_curves(reports, lines, goals[0]),
        "parallel": parallel_coordinates(lines, goals[0], log_keys),
        "lineage": lineage_graph(nodes, lines),
        "schedule": schedule(nodes, reports),
        "pareto": pareto(lines, goals) if len(goals) > 1 else None,
    }


def best_line(lines: Iterable[Line], goal: Goal) -> Line | None:
    """Return the line of the best trial: feasible before infeasible; of equals, that with the lowest number."""
    judged = [line for line in lines if line.get("objective") is not None and line.get("status") != "failed"]
    return max(judged, key=lambda line: (*_merit(line, goal), -int(line["trial"])), default=None)


def _merit(line: Line, goal: Goal) -> tuple[float, float]:
    """Return the key by which trials that have an objective compare, larger for better ones."""
    return -float(line.get("violation") or 0.0), goal.sign * float(line["objective"])


def trial_table(lines: Iterable[Line]) -> dict[str, Any]:
    """Return the trials as a table, `columns` and `rows`: numbers and texts, null for missing values."""
    kept = [{**(line.get("constraints") or {}), **line} for line in lines]
    bounded = list(dict.fromkeys(name for line in kept for name in line.get("constraints") or {}))
    keys = list(dict.fromkeys(key for line in kept for key in line.get("config") or {}))
    first = ["trial", "status", "objective"]
    optional = [
        *(name for name in bounded if name not in _MEASURES),
        "feasible",
        "parameters",
        "flops",
        "latency_ms",
        "parent",
        "change",
        "genome",
        "error",
    ]
    shown = [name for name in optional if any(line.get(name) not in (None, "") for line in kept)]
    columns = [*first, *keys, "steps", "seconds", *shown]
    rows = []
    for line in kept:
        config = line.get("config") or {}
        rows.append([cell(config.get(name) if name in keys else line.get(name)) for name in columns])
    return {"columns": columns, "rows": rows}


def cell(value: Any) -> Any:
    """Return a value as a table shows it: numbers unchanged, everything else as a short text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"


def best_so_far(lines: Iterable[Line], goal: Goal) -> dict[str, Any]:
    """Return the objective of each trial, in the order in which trials ended, and the best so far at that point."""
    ended = 0
    x: list[int] = []
    trials: list[int] = []
    objectives: list[float] = []
    best: list[float | None] = []
    so_far: float | None = None
    merit: tuple[float, float] | None = None
    for line in lines:
        ended += 1
        value = line.get("objective")
        if value is None:
            continue
        if line.get("status") != "failed" and (merit is None or _merit(line, goal) > merit):
            so_far, merit = float(value), _merit(line, goal)
        x.append(ended)
        trials.append(line["trial"])
        objectives.append(float(value))
        best.append(so_far)
    return {"x": x, "trials": trials, "objectives": objectives, "best": best}


def learning_curves(
    reports: Iterable[Line], lines: Iterable[Line], goal: Goal, metric: str | None = None
) -> dict[str, Any]:
    """Return the metric of each trial over its steps, the best trials last (they are drawn above the others).

    Only the best 400 trials are kept. Of a step that was reported twice, the last report counts.
    """
    name = metric or goal.metric
    points: dict[int, dict[int, float]] = {}
    for report in reports:
        value = report.get("metrics", {}).get(name)
        if value is not None and math.isfinite(value):
            points.setdefault(int(report["trial"]), {})[int(report["step"])] = float(value)
    status = {int(line["trial"]): line["status"] for line in lines}
    curves = [
        {"trial": trial, "status": status.get(trial, "running"), "x": sorted(by_step), "y": _in_order(by_step)}
        for trial, by_step in points.items()
    ]
    curves.sort(key=lambda curve: max(goal.sign * value for value in curve["y"]))
    return {"metric": name, "curves": curves[-_MAX_CURVES:], "num_left_out": max(0, len(curves) - _MAX_CURVES)}


def _in_order(by_step: Mapping[int, float]) -> list[float]:
    return [by_step[step] for step in sorted(by_step)]


def values_of(line: Line) -> dict[str, Any]:
    """Return the values chosen for a trial: its keys, and the entries of its genome if that is a short mapping."""
    genome = line.get("genome")
    genes: dict[str, Any] = {}
    if isinstance(genome, Mapping) and len(genome) <= _MAX_GENES:
        genes = {f"genome.{key}": value for key, value in genome.items() if isinstance(value, str | int | float | bool)}
    return {**(line.get("config") or {}), **genes}


def parallel_coordinates(lines: Iterable[Line], goal: Goal, log_keys: Iterable[str] = ()) -> dict[str, Any]:
    """Return one axis per searched key (and for the network size), the objective last; each trial is a line across
    them.

    Returns: {"trials": [...], "axes": [{"label", "values", "ticks": null or [[place, text], ...]}], "scores": [...]};
    the values of an axis are positions on it, in the order of `trials`; `scores` colour the lines, higher is better.
    """
    judged = [line for line in lines if line.get("objective") is not None]
    chosen = [values_of(line) for line in judged]
    logs = set(log_keys)
    axes = [_axis(key, [values.get(key) for values in chosen], key in logs) for key in _axis_keys(chosen)]
    sizes = [line.get("parameters") for line in judged]
    if len(set(sizes)) > 1 and all(sizes):
        axes.append(_axis("parameters", sizes, True))
    objectives = [float(line["objective"]) for line in judged]
    axes.append({"label": goal.metric, "values": objectives, "ticks": None})
    return {
        "trials": [line["trial"] for line in judged],
        "axes": axes,
        "scores": [goal.sign * value for value in objectives],
    }


def _axis_keys(chosen: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys that differ; of the keys of genomes, the first few that nearly every genome has."""
    keys = [key for key in dict.fromkeys(key for values in chosen for key in values) if len(_distinct(chosen, key)) > 1]
    genes = [key for key in keys if key.startswith("genome.")]
    common = [key for key in genes if sum(key in values for values in chosen) >= _COMMON * len(chosen)]
    return [key for key in keys if key not in genes or key in common[:_MAX_GENE_AXES]]


def _distinct(chosen: Sequence[Mapping[str, Any]], key: str) -> set[str]:
    return {json.dumps(values.get(key), sort_keys=True) for values in chosen}


def _axis(key: str, values: Sequence[Any], is_log: bool) -> dict[str, Any]:
    there = [value for value in values if value is not None]
    if there and len(there) < len(values) and all(_is_number(value) for value in there):
        return _with_missing(_axis(key, there, is_log), values)
    if all(_is_number(value) for value in values):
        if is_log and min(values) > 0:
            return {"label": key, "values": [math.log10(value) for value in values], "ticks": _log_ticks(values)}
        distinct = sorted(set(values))
        are_few = len(distinct) <= _MAX_TICKS and all(isinstance(value, int) for value in distinct)
        ticks = [[value, f"{value:g}"] for value in distinct] if are_few else None
        return {"label": key, "values": [float(value) for value in values], "ticks": ticks}
    texts = ["-" if value is None else str(cell(value)) for value in values]
    order = {text: place for place, text in enumerate(sorted(set(texts)))}
    return {
        "label": key,
        "values": [order[text] for text in texts],
        "ticks": [[place, text] for text, place in order.items()],
    }


def _with_missing(axis: dict[str, Any], values: Sequence[Any]) -> dict[str, Any]:
    """Return an axis of numbers with a place below them, `-`, for the trials that do not have the key."""
    low, high = min(axis["values"]), max(axis["values"])
    none, places = low - 0.15 * ((high - low) or 1.0), iter(axis["values"])
    numbers = [value for value in values if value is not None]
    ticks = axis["ticks"] or [[low, f"{min(numbers):.3g}"], [high, f"{max(numbers):.3g}"]]
    at = [none if value is None else next(places) for value in values]
    return {**axis, "values": at, "ticks": [[none, "-"], *ticks]}


def _log_ticks(values: Sequence[float]) -> list[list[Any]]:
    """Return ticks of a logarithmic axis: the decades in the range of the values, or finer ones for a smaller range."""
    low, high = min(values), max(values)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 2, 5)):
        numbers = [digit * 10.0**exponent for exponent in exponents for digit in digits]
        inside = [number for number in numbers if low * (1 - 1e-9) <= number <= high * (1 + 1e-9)]
        if len(inside) > 1:
            return [[math.log10(number), f"{number:g}"] for number in inside]
    return [[math.log10(number), f"{number:.3g}"] for number in (low, high)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def lineage_graph(nodes: Iterable[Line], lines: Iterable[Line]) -> dict[str, Any]:
    """Return the family tree of the trials: a position for each node and an edge from its parent.

    A trial is a row. Where trials take over from each other while they train (a population), a node is placed at its
    step. Otherwise it is placed at its generation: one after its parent's.

    Returns: {"axis": "step" or "generation", "nodes": [{"trial", "step", "x", "y", "change", "objective"}], "edges":
    [[index, index], ...]}, empty if no trial has a parent.
    """
    kept = sorted(nodes, key=lambda node: (int(node["step"]), int(node["trial"])))
    if not any(node.get("parent") is not None for node in kept):
        return {"axis": "generation", "nodes": [], "edges": []}
    by_step = any(int(node["step"]) > 0 for node in kept)
    objective = {int(line["trial"]): line.get("objective") for line in lines}
    placed: list[dict[str, Any]] = []
    edges: list[list[int]] = []
    last: dict[int, int] = {}
    for node in kept:
        trial, step, parent = int(node["trial"]), int(node["step"]), node.get("parent")
        source = last.get(int(parent)) if parent is not None else None
        before = last.get(trial)
        generation = 0 if source is None else placed[source]["generation"] + 1
        index = len(placed)
        placed.append(
            {
                "trial": trial,
                "step": step,
                "generation": generation,
                "x": step if by_step else generation,
                "y": trial,
                "change": str(node.get("change") or ""),
                "objective": objective.get(trial),
            }
        )
        edges += [[start, index] for start in dict.fromkeys((before, source)) if start is not None]
        last[trial] = index
    return {"axis": "step" if by_step else "generation", "nodes": placed, "edges": edges}


def schedule(nodes: Iterable[Line], reports: Iterable[Line]) -> dict[str, Any]:
    """Return the hyper-parameters of each trial over its steps: {"keys": {key: [{"trial", "x", "y"}]}}.

    They come from the `config` of nodes and reports; only numbers, and only keys that change.
    """
    known: dict[tuple[int, int], dict[str, Any]] = {}
    for entry in (*reports, *nodes):  # a report holds the config before its step, a node the config from its step on
        if isinstance(entry.get("config"), Mapping):
            known.setdefault((int(entry["trial"]), int(entry["step"])), {}).update(entry["config"])
    series: dict[str, dict[int, tuple[list[int], list[float]]]] = {}
    for (trial, step), config in sorted(known.items()):
        for key, value in config.items():
            if _is_number(value):
                x, y = series.setdefault(key, {}).setdefault(trial, ([], []))
                x.append(step)
                y.append(float(value))
    changing = {key: trials for key, trials in series.items() if any(len(set(y)) > 1 for _, y in trials.values())}
    return {
        "keys": {
            key: [{"trial": trial, "x": x, "y": y} for trial, (x, y) in trials.items()]
            for key, trials in changing.items()
        }
    }


def front_of(lines: Iterable[Line], goals: Sequence[Goal]) -> list[Line]:
    """Return the lines of the Pareto front: no other trial is at least as good in all objectives and better in one.

    They are sorted by the first objective, the best first. Infeasible trials are on no front.
    """
    judged = [line for line in lines if line.get("status") != "failed" and _has_all(line, goals)]
    judged = [line for line in judged if line.get("feasible", True)]
    scores = np.array([[goal.sign * float(line["objectives"][goal.metric]) for goal in goals] for line in judged])
    front = [
        index
        for index, score in enumerate(scores)
        if not np.any(np.all(scores >= score, axis=1) & np.any(scores > score, axis=1))
    ]
    return [judged[index] for index in sorted(front, key=lambda index: -scores[index, 0])]


def _has_all(line: Line, goals: Sequence[Goal]) -> bool:
    objectives = line.get("objectives") or {}
    return all(objectives.get(goal.metric) is not None for goal in goals)


def pareto(lines: Sequence[Line], goals: Sequence[Goal]) -> dict[str, Any]:
    """Return the objectives of each trial, and for each whether it is on the Pareto front.

    Returns: {"metrics": [...], "points": [{"trial", "values", "is_front"}]}.
    """
    front = {int(line["trial"]) for line in front_of(lines, goals)}
    points = [
        {
            "trial": line["trial"],
            "values": [float(line["objectives"][goal.metric]) for goal in goals],
            "is_front": int(line["trial"]) in front,
        }
        for line in lines
        if _has_all(line, goals)
    ]
    return {"metrics": [goal.metric for goal in goals], "points": points}
