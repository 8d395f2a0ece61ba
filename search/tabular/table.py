"""The table: how every cell of the small space does on `digits`, measured once over three seeds.

`benchmarks/make_table.py` made it, and makes it again: 2 epochs of SGD (batches of 64, momentum 0.9, learning rate 0.1
by a cosine), 1,437 training images, accuracy and cross-entropy on the other 360. The seeds differ in the first weights;
networks of one seed start alike at like places, and all see the same batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from orchestray.search.spaces.cell import NUM_INPUTS, Cell
from orchestray.search.tabular.space import CHANNELS, NUM_NODES, OPERATIONS

if TYPE_CHECKING:
    from orchestray.search.spaces.base import Genome

TABLE_FILE = Path(__file__).with_name("table.npz")


@dataclass(frozen=True)
class Table:
    """What was measured, a row a network."""

    index: np.ndarray
    """[genomes], in the order of `Cell.enumerate`: the row of each genome's network."""
    keys: tuple[str, ...]
    """[networks]: the key of each in the space."""
    accuracy: np.ndarray
    """[networks, seeds], on the validation images."""
    loss: np.ndarray
    """[networks, seeds], mean cross-entropy on the validation images."""

    @property
    def scores(self) -> np.ndarray:
        """[networks]: the mean over the seeds of minus the cross-entropy; to be maximised. Unlike accuracies, no two
        are alike.
        """
        mean: np.ndarray = -self.loss.mean(axis=1)
        return mean

    def row_of(self, genome: Genome) -> int:
        """The row of a genome's network."""
        return int(self.index[number_of(genome)])

    def top(self, fraction: float) -> np.ndarray:
        """The rows of the best networks: this fraction of all, at least one; the best first."""
        num = max(1, round(fraction * len(self.scores)))
        best: np.ndarray = np.argsort(-self.scores)[:num]
        return best


@cache
def load_table() -> Table:
    """The table that comes along."""
    with np.load(TABLE_FILE, allow_pickle=False) as stored:
        keys = tuple(row.tobytes().hex() for row in stored["keys"])
        return Table(stored["index"], keys, stored["accuracy"], stored["loss"])


def number_of(genome: Genome) -> int:
    """The place of a genome in the order of `Cell.enumerate`: its choices as digits, the last turning fastest."""
    number = 0
    for node in range(NUM_NODES):
        for side in ("left", "right"):
            number = number * (node + NUM_INPUTS) + genome[f"normal.{node}.{side}.from"]
            number = number * len(OPERATIONS) + OPERATIONS.index(genome[f"normal.{node}.{side}.operation"])
    return number


class TableSpace(Cell):
    """The cells of the table, with keys looked up, not computed."""

    def __init__(self, table: Table | None = None) -> None:
        super().__init__(nodes=NUM_NODES, operations=OPERATIONS, cells=1, channels=CHANNELS, reductions=0)
        self.table = load_table() if table is None else table

    def key(self, genome: Any) -> str:
        return self.table.keys[self.table.row_of(genome)]
