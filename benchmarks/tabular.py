"""Evaluations until a network of the top 0.1 % of the table: regularised evolution against random search."""

from __future__ import annotations

import statistics
from typing import Any

from harness import Options, Report, run, say

from orchestray.search.methods.base import Method
from orchestray.search.methods.registry import make_method
from orchestray.search.tabular.benchmark import run_on_table
from orchestray.search.tabular.table import TableSpace, load_table

_TOP = 0.001
_GOAL = 1 / 3
_EVOLUTION: dict[str, Any] = {"population": 50, "sample_size": 20}
_TRIALS_OF_EVOLUTION = 500
"""Where it has settled, most of what it draws is known, and the rest of the table takes it long."""


def evaluations(type_: str, seed: int, trials: int, **parameters: Any) -> int:
    """Evaluations of one search of so many trials until the top; the whole table if it did not get there."""

    def make(space: TableSpace) -> Method:
        return make_method(type_, space={}, architecture=space, seed=seed, trials=trials, **parameters)

    reached = run_on_table(make, top=_TOP).evaluations_to_top
    return len(load_table().keys) if reached is None else reached


def measure(report: Report, options: Options) -> None:
    seeds, table = options.rounds(20, quick=3), load_table()
    report.settings = {
        "seeds": seeds,
        "networks": len(table.keys),
        "top": len(table.top(_TOP)),
        "evolution": {**_EVOLUTION, "trials": _TRIALS_OF_EVOLUTION},
    }
    counts: dict[str, list[float]] = {}
    for name, trials, parameters in (
        ("regularized_evolution", _TRIALS_OF_EVOLUTION, _EVOLUTION),
        ("random", len(table.keys), {}),
    ):
        say(name)
        counts[name] = [float(evaluations(name, seed, trials, **parameters)) for seed in range(seeds)]
        report.add(f"{name}: evaluations to the top {_TOP:.1%}", "", counts[name])
    report.table(
        ["method", "evaluations, median", "least", "most"],
        [
            [name, f"{statistics.median(found):.0f}", f"{min(found):.0f}", f"{max(found):.0f}"]
            for name, found in counts.items()
        ],
    )
    ratio = sum(counts["regularized_evolution"]) / sum(counts["random"])
    report.goal("evaluations, regularised evolution / random (means)", ratio, _GOAL)
    report.notes.append("A search that did not get there counts as one that evaluated every network of the table.")


if __name__ == "__main__":
    run("tabular", "Evaluations to the top 0.1 % of the table of networks, over seeds.", measure)
