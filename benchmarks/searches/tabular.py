"""Evaluations until a network of the top 0.1 % of the table: regularised evolution against random search.

The other methods that can search the table's space stand beside, each with as many trials as it has use for.
"""

from __future__ import annotations

import statistics
from typing import Any

from harness.benchmark import Options, Report, run, say
from lab.tabular.benchmark import run_on_table
from lab.tabular.table import TableSpace, load_table
from orchestray.search.methods.base import Method
from orchestray.search.registry.methods import make_method

_TOP = 0.001
_GOAL = 1 / 3
_EVOLUTION: dict[str, Any] = {"population": 50, "sample_size": 20}
_TRIALS_OF_EVOLUTION = 500
"""Trials after which evolution has settled: most of what it draws is known, and the rest of the table takes long."""
_BESIDE: dict[str, tuple[int, dict[str, Any]]] = {
    "bayesian": (200, {}),
    "bayesian, tpe": (300, {"model": "tpe"}),
    "hierarchical_evolution": (500, {"population": 50}),
    "large_scale_evolution": (500, {"population": 50}),
    "progressive": (500, {"beam": 50}),
    "q_learning": (500, {}),
    "reinforce": (500, {}),
}
"""Trials and parameters of what is measured for information, by method."""
_LEFT_OUT = (
    "Not measured: grid, which refuses the space, as thousands of its genomes in a row are one network; enas, darts "
    "and smash, which train shared weights, and those that stop trials early, of neither of which the table knows "
    "anything; methods made for other spaces."
)


def evaluations(name: str, seed: int, trials: int, parameters: dict[str, Any]) -> int | None:
    """Return the evaluations of one search of `trials` trials until the top; None if it did not get there."""

    def make(space: TableSpace) -> Method:
        type_ = name.partition(",")[0]
        return make_method(type_, space={}, architecture=space, seed=seed, trials=trials, **parameters)

    return run_on_table(make, top=_TOP).evaluations_to_top


def measure(report: Report, options: Options) -> None:
    seeds, seeds_beside, whole = options.rounds(20, quick=3), options.rounds(10, quick=1), len(load_table().keys)
    report.settings = {
        "seeds": seeds,
        "seeds_of_those_beside": seeds_beside,
        "networks": whole,
        "top": len(load_table().top(_TOP)),
        "evolution": {**_EVOLUTION, "trials": _TRIALS_OF_EVOLUTION},
    }
    report.details["beside"] = {
        name: {**parameters, "trials": trials} for name, (trials, parameters) in _BESIDE.items()
    }
    counts: dict[str, list[float]] = {}
    rows = []
    for name, trials, parameters, num in (
        ("regularized_evolution", _TRIALS_OF_EVOLUTION, _EVOLUTION, seeds),
        ("random", whole, {}, seeds),
        *((name, trials, parameters, seeds_beside) for name, (trials, parameters) in _BESIDE.items()),
    ):
        say(name)
        reached = [evaluations(name, seed, trials, parameters) for seed in range(num)]
        counts[name] = found = [float(whole if one is None else one) for one in reached]
        report.add(f"{name}: evaluations to the top {_TOP:.1%}", "", found)
        shown = [f"{value:.0f}" for value in (statistics.median(found), min(found), max(found))]
        rows.append([name, *shown, f"{num - reached.count(None)} of {num}", str(trials)])
    report.table(["method", "evaluations, median", "least", "most", "got there", "trials at most"], rows)
    ratio = sum(counts["regularized_evolution"]) / sum(counts["random"])
    report.goal("evaluations, regularised evolution / random (means)", ratio, _GOAL)
    report.notes.append("A search that did not get there counts as one that evaluated every network of the table.")
    report.notes.append("The goal is that of the first two; the others are there for information, with fewer seeds.")
    report.notes.append(_LEFT_OUT)


if __name__ == "__main__":
    run("tabular", "Evaluations to the top 0.1 % of the table of networks, over seeds.", measure)
