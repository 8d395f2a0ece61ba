"""The comparison of runs as a table for the terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import RenderableType

    from orchestray.trainers.saved.compare import Comparison

_NUM_NAMED = 5


def comparison_table(reference: str, comparisons: Sequence[Comparison]) -> RenderableType:
    """Return a table with one row per run; differences without a number are left to `remarks`."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(f"against {reference}", overflow="fold")
    table.add_column("weights", no_wrap=True)
    table.add_column("most in", overflow="fold")
    table.add_column("losses", no_wrap=True)
    table.add_column("most at", no_wrap=True)
    for found in comparisons:
        weights, losses = found.weights, found.losses
        table.add_row(
            Text(found.name),
            _cell(weights.max_difference, weights.same_bits),
            Text(weights.tensor or "-"),
            _cell(losses.max_difference, losses.same_bits),
            Text("-" if losses.step is None else f"step {losses.step:,}"),
        )
    return table


def remarks(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yield sentences on differences that have no number in the table."""
    for found in comparisons:
        weights, losses = found.weights, found.losses
        if weights.missing:
            yield f"{found.name} lacks {_named(weights.missing)}."
        if weights.unexpected:
            yield f"{found.name} alone has {_named(weights.unexpected)}."
        if weights.shapes:
            yield f"{found.name} has other shapes: {_changed(weights.shapes)}."
        if weights.dtypes:
            yield f"{found.name} has other dtypes: {_changed(weights.dtypes)}."
        if losses.num_only_in_one:
            num = losses.num_only_in_one
            yield f"{found.name}: {num:,} step{'s were' if num > 1 else ' was'} done by one of the two runs only."


def _cell(difference: float | None, same_bits: bool) -> RenderableType:
    from rich.text import Text

    if same_bits:
        return Text("the same bits", style="green")
    if difference is None:
        return Text("-")
    if math.isinf(difference):
        return Text("not a number", style="red")
    return Text(f"{difference:.2g}")


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return ", ".join(names[:_NUM_NAMED]) + more


def _changed(pairs: Mapping[str, Sequence[object]]) -> str:
    return _named([f"{name} {before} -> {after}" for name, (before, after) in pairs.items()])
