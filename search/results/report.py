"""The report of a search, `report.html`: one page that loads nothing from the network."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import OrchestrayError
from orchestray.platform.run.files import dump_json
from orchestray.platform.terminal.format import duration, number
from orchestray.search.results.figures import Goal, Line, all_figures, cell
from orchestray.search.results.importance import importance
from orchestray.search.results.schema import ended_text

if TYPE_CHECKING:
    from orchestray.search.config.schema import SearchConfig

_MAX_BARS = 10
_MAX_NETWORK = 400
"""Maximum number of characters of a network's description; the whole of it is in `result.json`, and drawn."""
_ASSETS = files("orchestray.search.results") / "assets"


def report_html(
    config: SearchConfig,
    result: Mapping[str, Any],
    lines: Sequence[Line],
    reports: Sequence[Line],
    nodes: Sequence[Line],
) -> str:
    """Return the page as HTML.

    Args:
        config: config of the search.
        result: content of `result.json`.
        lines: lines of `trials.jsonl`.
        reports: lines of `reports.jsonl`.
        nodes: nodes of `lineage.json`.
    """
    goals, log_keys = goals_of(config), log_keys_of(config)
    best = result.get("best") or {}
    data = {
        "name": config.name,
        "about": about(config),
        "tiles": _tiles(result, goals[0]),
        "error": result.get("error") or result.get("infeasible") or result.get("cut_off"),
        "best": _best_values(best, goals[0]),
        "best_trial": best.get("trial"),
        "figures": all_figures(lines, reports, nodes, goals, log_keys),
        "importance": importance(lines, goals[0], log_keys)[:_MAX_BARS],
        "network": drawn_network(config, best.get("genome")),
    }
    return Template(asset("report.html")).substitute(
        title=html.escape(config.name),
        style=asset("report.css"),
        plotly=plotly_script(),
        figures=asset("figures.js"),
        data=dump_json(data).replace("<", "\\u003c"),
    )


def goals_of(config: SearchConfig) -> list[Goal]:
    """Return the objectives of a search."""
    return [Goal(objective.metric, str(objective.mode)) for objective in config.search.objective]


def log_keys_of(config: SearchConfig) -> list[str]:
    """Return the keys searched on a logarithmic scale."""
    return [key for key, dimension in config.search.space.items() if dimension.type.startswith("log_")]


def about(config: SearchConfig) -> str:
    """Return a one-sentence description of the search."""
    search = config.search
    what = [*search.space, *([f"{search.architecture.space} networks"] if search.architecture else [])]
    return f"{search.method.type} over {', '.join(what)} for {objectives_text(config)}; task {config.base.task.type}"


def objectives_text(config: SearchConfig) -> str:
    """Return the objectives with their directions and bounds: `accuracy (max), subject to parameters at most 500`."""
    goals = " and ".join(f"{goal.metric} ({goal.mode})" for goal in config.search.objective)
    return f"{goals}, subject to {bounds}" if (bounds := bounds_text(config)) else goals


def bounds_text(config: SearchConfig) -> str:
    """Return the bounds of a search, "parameters at most 50,000 and accuracy at least 0.5"; empty without bounds."""
    limits = [
        (name, *limit)
        for name, one in config.search.bounds.items()
        for limit in (("most", one.max), ("least", one.min))
    ]
    return " and ".join(f"{name} at {which} {number(limit)}" for name, which, limit in limits if limit is not None)


def drawn_network(config: SearchConfig, genome: Any) -> str | None:
    """Return the network of a genome as an `<svg>` element; None without a genome, or if its space is gone."""
    if genome is None:
        return None
    from orchestray.search.registry.check import space_of
    from orchestray.search.spaces.drawing.draw import draw
    from orchestray.search.spaces.registry import graph_of

    try:
        space = space_of(config)
    except OrchestrayError:
        return None
    return None if space is None else draw(graph_of(space, genome), "the best network")


def plotly_script() -> str:
    """Return the JavaScript of Plotly that comes with the `plotly` package."""
    return (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def asset(name: str) -> str:
    """Return the text of an asset of the report."""
    return (_ASSETS / name).read_text(encoding="utf-8")


def _tiles(result: Mapping[str, Any], goal: Goal) -> list[list[str]]:
    best, by_status = result.get("best") or {}, ended_text(result)
    return [
        ["status", str(result.get("status"))],
        [f"best {goal.metric}", number(best.get("objective"))],
        [f"trials ({by_status})" if by_status else "trials", number(result.get("trials"))],
        [f"{result.get('unit', 'steps')} in all", number(result.get("steps"))],
        ["time", duration(result.get("seconds"))],
    ]


def _best_values(best: Mapping[str, Any], goal: Goal) -> list[list[str]]:
    if not best:
        return []
    rows = [["trial", str(best["trial"])], [goal.metric, number(best.get("objective"))]]
    rows += [[key, _text(value)] for key, value in (best.get("config") or {}).items()]
    measures = {name: best[name] for name in ("parameters", "flops", "latency_ms") if best.get(name) is not None}
    rows += [[name, number(value)] for name, value in {**measures, **(best.get("constraints") or {})}.items()]
    if "feasible" in best:
        rows.append(["feasible", "yes" if best["feasible"] else "no"])
    if best.get("genome") is not None:
        text = best.get("network") or json.dumps(best["genome"])
        rows.append(["network", text if len(text) <= _MAX_NETWORK else f"{text[: _MAX_NETWORK - 1]}…"])
    return rows


def _text(value: Any) -> str:
    return number(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(cell(value))
