"""The table: how every cell of the small space does on `digits`, measured once over three seeds.

`python benchmarks make_table` made it, and makes it again. Training is 2 epochs of SGD on 1,437 images: batches of 16,
Nesterov momentum 0.9, learning rate 0.3 by a cosine. Accuracy and cross-entropy are those on the other 360. The seeds
differ in the first weights; networks of one seed start alike at like places, and all see the same batches. A few in a
thousand diverged: their cross-entropy is that of guessing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lab.tabular.space import CHANNELS, NUM_NODES, OPERATIONS
from orchestray.platform.errors import ConfigError, OrchestrayError
from orchestray.search.spaces.architectures.cell import NUM_INPUTS, Cell

if TYPE_CHECKING:
    from orchestray.search.spaces.architectures.base import Genome

TABLE_FILE = Path(__file__).with_name("table.npz")

_CHOICES = tuple(
    choice
    for node in range(NUM_NODES)
    for side in ("left", "right")
    for choice in (
        (f"normal.{node}.{side}.from", tuple(range(node + NUM_INPUTS))),
        (f"normal.{node}.{side}.operation", OPERATIONS),
    )
)
"""Name and options of every choice of a genome, in their order."""


@dataclass(frozen=True)
class Table:
    """Measurements, a row a network."""

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
        """Scores [networks]: the mean over the seeds of minus the cross-entropy; to be maximised.

        Unlike accuracies, no two are alike.
        """
        mean: np.ndarray = -self.loss.mean(axis=1)
        return mean

    def row_of(self, genome: Genome) -> int:
        """Return the row of a genome's network."""
        return int(self.index[number_of(genome)])

    def top(self, fraction: float) -> np.ndarray:
        """Return the rows of the best networks: this fraction of all, at least one; the best first."""
        num = max(1, round(fraction * len(self.scores)))
        best: np.ndarray = np.argsort(-self.scores)[:num]
        return best

    @property
    def is_complete(self) -> bool:
        """True if every network has been measured."""
        return not bool(np.isnan(self.loss).any())

    def write(self, file: Path) -> None:
        """Write the table aside, then put it in its place."""
        key_bytes = np.frombuffer(bytes.fromhex("".join(self.keys)), dtype=np.uint8).reshape(len(self.keys), -1)
        aside = file.with_suffix(".aside.npz")
        np.savez_compressed(aside, index=self.index, keys=key_bytes, accuracy=self.accuracy, loss=self.loss)
        aside.replace(file)

    @classmethod
    def read(cls, file: Path) -> Table:
        """Read a table that was written."""
        with np.load(file, allow_pickle=False) as stored:
            keys = tuple(row.tobytes().hex() for row in stored["keys"])
            return cls(stored["index"], keys, stored["accuracy"], stored["loss"])


@cache
def load_table() -> Table:
    """Read the table of the repository.

    Raises:
        OrchestrayError: the table is not complete.
    """
    table = Table.read(TABLE_FILE)
    if not table.is_complete:
        left = int(np.isnan(table.loss).any(axis=1).sum())
        raise OrchestrayError(
            f"{left} of the {len(table.keys)} networks of the table are not measured yet; "
            "python benchmarks make_table goes on with them"
        )
    return table


def number_of(genome: Genome) -> int:
    """Return the place of a genome in the order of `Cell.enumerate`: its choices as digits, the last turning fastest.

    Raises:
        ConfigError: the genome is none of them.
    """
    number = 0
    for name, options in _CHOICES:
        if genome.get(name) not in options:
            raise ConfigError(
                f"The table has every cell of {NUM_NODES} nodes over {', '.join(OPERATIONS)}, and {genome!r} is none "
                "of them: a method that builds smaller ones (progressive by grow_by: nodes) has no answer here."
            )
        number = number * len(options) + options.index(genome[name])
    return number


def genome_at(number: int) -> dict[str, Any]:
    """Return the genome at a place in the order of `Cell.enumerate`."""
    genome: dict[str, Any] = {}
    for name, options in reversed(_CHOICES):
        number, index = divmod(number, len(options))
        genome[name] = options[index]
    return dict(reversed(genome.items()))


class TableSpace(Cell):
    """The cells of the table, with keys looked up, not computed."""

    def __init__(self, table: Table | None = None) -> None:
        super().__init__(nodes=NUM_NODES, operations=OPERATIONS, cells=1, channels=CHANNELS, reductions=0)
        self.table = load_table() if table is None else table

    def key(self, genome: Any) -> str:
        return self.table.keys[self.table.row_of(genome)]
