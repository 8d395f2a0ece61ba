"""Evaluations until a network of the top 0.1 % of the table, regularised evolution against random: goal <= 1/3.

python benchmarks/tabular.py
"""

from __future__ import annotations

import argparse

import numpy as np

from orchestray.search.methods.base import Method
from orchestray.search.methods.registry import make_method
from orchestray.search.tabular.benchmark import run_on_table
from orchestray.search.tabular.table import TableSpace, load_table

GOAL = 1 / 3


def evaluations(type_: str, seed: int, **parameters: object) -> int:
    """Evaluations of one search until the top; all of them if it never got there."""

    def make(space: TableSpace) -> Method:
        return make_method(type_, space={}, architecture=space, seed=seed, trials=len(space.table.keys), **parameters)

    run = run_on_table(make)
    return len(run.rows) if run.evaluations_to_top is None else run.evaluations_to_top


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    arguments = parser.parse_args()
    table = load_table()
    print(f"{len(table.keys)} networks, {len(table.top(0.001))} of them in the top 0.1 %")
    means = {}
    for name, parameters in (
        ("regularized_evolution", {"population": 50, "sample_size": 20}),
        ("random", {}),
    ):
        counts = [evaluations(name, seed, **parameters) for seed in range(arguments.seeds)]
        means[name] = float(np.mean(counts))
        low, middle, high = np.percentile(counts, [0, 50, 100])
        print(f"{name:24} mean {np.mean(counts):7.1f}  median {middle:7.1f}  min {low:5.0f}  max {high:5.0f}")
    ratio = means["regularized_evolution"] / means["random"]
    print(f"ratio of the means {ratio:.2f}, goal <= {GOAL:.2f}: {'reached' if ratio <= GOAL else 'missed'}")


if __name__ == "__main__":
    main()
