"""The result of an experiment: a table, and what it shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

Cell: TypeAlias = str | int | float | None
"""A text, or a number with the unit of its column; None where there is none."""


@dataclass(frozen=True)
class Exhibit:
    """A table of one experiment.

    Args:
        name: name of the experiment.
        title: what is compared, in a few words.
        columns: names of the columns, with their units.
        rows: rows of the table.
        findings: sentences on what the rows show.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    findings: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def texts(self) -> list[list[str]]:
        """Return the rows as texts: numbers with three digits."""
        return [[_text(cell) for cell in row] for row in self.rows]


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.3g}" if abs(cell) < 1000 else f"{cell:,.0f}"
    return f"{cell:,}" if isinstance(cell, int) else cell
