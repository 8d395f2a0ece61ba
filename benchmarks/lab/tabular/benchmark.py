"""A method against the table: what takes days of training takes seconds, and the best there is is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lab.tabular.table import Table, TableSpace, load_table
from orchestray.search.methods.base import Method, Proposal
from orchestray.search.simulation.virtual_time import simulate


@dataclass(frozen=True)
class TabularRun:
    """Outcome of a method on the table."""

    rows: tuple[int, ...]
    """The networks that it evaluated, in order."""
    regrets: np.ndarray
    """[evaluations]: the best score of the table, less the best so far; 0 from the optimum on."""
    evaluations_to_top: int | None
    """Evaluations until the first network of the wanted top; None: never."""


def run_on_table(
    make: Callable[[TableSpace], Method], *, top: float = 0.001, workers: int = 1, table: Table | None = None
) -> TabularRun:
    """Run a method on the table to its end.

    Args:
        make: makes the method on the table's space.
        top: fraction of the networks that counts as the top; at least one does.
        workers: trials at once.
        table: default: the one that comes along.
    """
    table = load_table() if table is None else table
    scores, wanted = table.scores, set(table.top(top).tolist())
    rows: list[int] = []

    def evaluate(proposal: Proposal, _step: int) -> float:
        rows.append(table.row_of(proposal.genome))
        return float(scores[rows[-1]])

    simulate(make(TableSpace(table)), evaluate, workers=workers)
    best_so_far = np.maximum.accumulate(scores[rows])
    first = next((number for number, row in enumerate(rows, start=1) if row in wanted), None)
    return TabularRun(tuple(rows), scores.max() - best_so_far, first)
