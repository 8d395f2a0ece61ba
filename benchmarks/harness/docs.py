"""Write results into the pages of docs/benchmarks/: `python benchmarks docs`, or `--only exchanges`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import benchmark

_DOCS = benchmark.REPOSITORY / "docs"
_EXCHANGES, _RATES = _DOCS / "pictures" / "exchanges.svg", _DOCS / "pictures" / "serving.svg"
_BEGIN, _END = "<!-- results of the benchmarks: begin -->", "<!-- results of the benchmarks: end -->"

Result = dict[str, Any]


@dataclass(frozen=True)
class _Page:
    """Results that a page shows, and where."""

    table: str
    """The benchmark whose table is shown first."""
    show: Callable[[Result], list[str]]
    beside: tuple[str, ...]
    """Benchmarks whose own tables follow it."""
    goals: tuple[str, ...]
    """Benchmarks that are held against something."""
    beyond: tuple[tuple[str, Callable[[Result], list[str]]], ...] = ()
    """Benchmarks of which more is to be known than whether their goals are met, and how that is said."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=tuple(_PAGES), default=None)
    parser.add_argument("--results-dir", type=Path, default=benchmark.RESULTS, help="default: results/ here")
    parser.add_argument("--docs-dir", type=Path, default=_DOCS, help="default: docs/ of the repository")
    options = parser.parse_args()
    written = [
        path.name
        for name, page in _PAGES.items()
        if options.only in (None, name)
        and write(path := options.docs_dir / "benchmarks" / f"{name}.md", page, options.results_dir)
    ]
    if options.only is None and (options.results_dir / "summary.md").exists():
        path = options.docs_dir / "benchmarks" / "every-goal.md"
        path.write_text((options.results_dir / "summary.md").read_text(encoding="utf-8"), encoding="utf-8")
    if not written:
        sys.exit(f"there are no results in {options.results_dir}: run `python benchmarks run_all` first")
    print("written: " + ", ".join(written))


def write(path: Path, page: _Page, results: Path) -> bool:
    """Put the results there are into the page at `path`; False if there are none."""
    first = _result(results, page.table)
    beside = {other: result for other in page.beside if (result := _result(results, other)) is not None}
    found = {other: result for other in page.goals if (result := _result(results, other)) is not None}
    if first is None and not beside and not found:
        return False
    before, begin, rest = path.read_text(encoding="utf-8").partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        sys.exit(f"{path.name} has no place for results: a line '{_BEGIN}', and after it a line '{_END}'")
    lines = page.show(first) if first is not None else []
    for result in beside.values():
        lines += _table(result)
    lines += _held_against(found) if found else []
    for other, say in page.beyond:
        if (result := _result(results, other)) is not None:
            lines += say(result)
    path.write_text("\n".join([before + begin, "", *lines, end + after]), encoding="utf-8")
    return True


def _layouts(result: Result) -> list[str]:
    return [
        f"One training, a fully connected network of 0.8 M parameters, under each layout on {_cores(result)} cores.",
        "So small a one shows what is sent and kept, and what is exact, not how fast a large model would be.",
        "",
        *_rows(result),
    ]


def _exchanges(result: Result) -> list[str]:
    lines = [
        f"One training, `digits` with 26,000 parameters, under each exchange on {_cores(result)} cores.",
        "",
        *_rows(result),
    ]
    shown = "Validation accuracy against the bytes that a run sends, on a logarithmic scale: a point an exchange"
    return lines + _picture(_EXCHANGES, shown)


def _rates(result: Result) -> list[str]:
    shown = "Mean latency against the rate of requests, on a logarithmic scale: a line a server"
    return [result["claim"], "", *_picture(_RATES, shown), *_rows(result)]


def _picture(path: Path, shown: str) -> list[str]:
    return [f"![{shown}](../{path.relative_to(_DOCS)})", ""] if path.exists() else []


def _table(result: Result) -> list[str]:
    return [result["claim"], "", *_rows(result)]


def _rows(result: Result) -> list[str]:
    rows = [line for table in result["tables"][:1] for line in benchmark.table(table["header"], table["rows"])]
    return [*rows, *(f"- {note}" for note in result["notes"]), ""]


def _in_search_and_out(result: Result) -> list[str]:
    return ["What `architecture_search` says of chance:", "", *(f"- {note}" for note in result["notes"]), ""]


def _operators(result: Result) -> list[str]:
    text = f"The best algorithm beside torch's own, as part of torch's time, on {_cores(result)} cores (`operators`):"
    return [text, "", *_ratios(result), *(f"- {note}" for note in result["notes"]), ""]


def _optimizers(result: Result) -> list[str]:
    """Return the table of each task."""
    lines = [f"Settings chosen by as many trials of a search each, on {_cores(result)} cores (`second_order`):", ""]
    for table in result["tables"]:
        lines += benchmark.table(table["header"], table["rows"])
    return [*lines, *(f"- {note}" for note in result["notes"]), ""]


def _batch_sizes(result: Result) -> list[str]:
    return ["The minibatch size, on the digits CNN (`batch_sizes`):", "", *_rows(result)]


def _packed(result: Result) -> list[str]:
    return [
        "The time of a packed population, as part of that of the same members apart (`packed_population`):",
        "",
        *_ratios(result),
    ]


def _ratios(result: Result) -> list[str]:
    rows = [
        [ratio["name"], f"{ratio['median']:.3g}", f"{ratio['min']:.3g}", f"{ratio['max']:.3g}"]
        for ratio in result["ratios"]
    ]
    return benchmark.table(["what", "median", "least", "most"], rows)


def _regrets(result: Result) -> list[str]:
    """Return the table of ours beside the peers, function by function."""
    (compared,) = result["tables"]
    return [
        "What is missing at the end of a search, over seeds (`bayesian`; less is better): medians with quartiles.",
        "",
        *benchmark.table(compared["header"], compared["rows"]),
    ]


def _history(result: Result) -> list[str]:
    """Return what `proposal_cost` says of memory, and of methods that end by themselves."""
    wanted = int(result["settings"]["finished_trials"])
    kept_kb = {
        goal["name"].partition(": ")[0]: goal["value"]
        for goal in result["goals"]
        if "what a trial leaves behind" in goal["name"]
    }
    least, most = min(kept_kb, key=lambda name: kept_kb[name]), max(kept_kb, key=lambda name: kept_kb[name])
    ended = [f"`{row[0]}` after {int(row[1]):,}" for row in result["tables"][0]["rows"] if int(row[1]) < wanted]
    text = (
        "Memory is not flat (`proposal_cost`): a method keeps a history, which grows with every trial, by "
        f"{kept_kb[least]:.1g} kB a trial (`{least}`) to {kept_kb[most]:.3g} kB (`{most}`), so that {wanted:,} trials "
        f"of the latter hold about {kept_kb[most] * wanted / 1e3:.0f} MB."
    )
    if ended:
        text += (
            f" Some methods end by themselves before {wanted:,} trials: {', '.join(ended)}. Of these the cost of a "
            "proposal is that at their end, and their memory was not measured."
        )
    return [text, ""]


def _cores(result: Result) -> int:
    return int(result["machine"]["cores"])


def _held_against(results: dict[str, Result]) -> list[str]:
    rows = [
        [name, goal["name"], _with_unit(goal, "value"), _with_unit(goal, "limit"), benchmark.verdict(goal["met"])]
        for name, result in results.items()
        for goal in result["goals"]
    ]
    missed = sum(not goal["met"] for result in results.values() for goal in result["goals"])
    return [
        "Against what others do, and against what was promised; the files of `benchmarks/results/` have every number.",
        f"Of {len(rows)} goals, {missed or 'none'} {'are' if missed > 1 else 'is'} missed:",
        "",
        *benchmark.table(["benchmark", "what", "median", "goal: at most", ""], rows),
    ]


def _with_unit(goal: dict[str, Any], key: str) -> str:
    return f"{goal[key]:.3g} {goal['unit']}".strip()


def _result(results: Path, name: str) -> Result | None:
    path = results / f"{name}.json"
    if not path.exists():
        return None
    result: Result = json.loads(path.read_text(encoding="utf-8"))
    return result


_PAGES = {
    "operators": _Page("operators", _operators, (), ()),
    "optimizers": _Page(
        "second_order",
        _optimizers,
        (),
        ("second_order", "optimizers", "batch_sizes"),
        (("batch_sizes", _batch_sizes),),
    ),
    "layouts": _Page(
        "layouts", _layouts, (), ("pipeline", "naive_split", "sharding", "tensor_parallel", "recompute", "split")
    ),
    "exchanges": _Page(
        "exchanges",
        _exchanges,
        ("compression",),
        (
            "exchanges",
            "local_sgd",
            "parameter_server",
            "replication_flood",
            "small_data",
            "hogwild",
            "straggler",
            "worker_killed",
            "simulated_cluster",
        ),
    ),
    "search": _Page(
        "tabular",
        _table,
        (),
        (
            "trivial_trials",
            "population_toy",
            "packed_population",
            "architecture_search",
            "bayesian",
            "proposal_cost",
            "tabular",
            "asha",
            "nested_trials",
        ),
        (
            ("architecture_search", _in_search_and_out),
            ("packed_population", _packed),
            ("bayesian", _regrets),
            ("proposal_cost", _history),
        ),
    ),
    "serving": _Page(
        "serve_rates",
        _rates,
        (),
        (
            "batching_poisson",
            "batching_sweep",
            "batching_steps",
            "overload",
            "serve_rates",
            "serve_peers",
            "serve_noop",
            "serve_ready",
            "serve_replicas",
            "serve_past_the_lock",
            "serve_kill",
            "serve_scaling",
            "continuous_batching",
            "pipeline_serving",
        ),
    ),
}

if __name__ == "__main__":
    main()
