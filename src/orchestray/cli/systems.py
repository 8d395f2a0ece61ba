"""`orchestray systems`: the systems of the field that work here, with the command and the test of each."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from orchestray.cli.options import Json
from orchestray.cli.systems_table import GROUPS, State, System, find_system, load_systems

app = typer.Typer(add_completion=False)

_NAME_WIDTH = 26
_INDENT = 3


@app.command(epilog="Example: orchestray systems 'nesterov momentum'")
def systems(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="One system in detail; part of its name is enough.", show_default=False),
    ] = None,
    *,
    missing: Annotated[bool, typer.Option("--missing", help="The systems that do not work here, and why.")] = False,
    as_json: Json = False,
) -> None:
    """Show the systems of the field that work here: the command that runs each, and the test that shows it."""
    console = Console(highlight=False)
    if name is not None:
        system = find_system(name)
        _show(console, _detail(system), system.to_json(), as_json=as_json)
        return
    everything = load_systems()
    counts = Counter(system.state for system in everything)
    shown = [system for system in everything if (system.state is State.WORKS) is not missing]
    tables = _missing_tables(shown) if missing else _working_tables(shown, console.width)
    result = {
        "num_systems": len(everything),
        **{state.name.lower(): counts[state] for state in State},
        "systems": [system.to_json() for system in shown],
    }
    _show(console, Group(*tables, _summary(counts)), result, as_json=as_json)


def _show(console: Console, view: RenderableType, result: object, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        console.print(view)


def _working_tables(shown: Sequence[System], width: int) -> list[RenderableType]:
    tables: list[RenderableType] = []
    for letter, members in _by_group(shown):
        table = _table(letter)
        table.add_column(ratio=1, overflow="fold")
        for system in members:
            table.add_row(Text(system.name, style="bold"))
            table.add_row(_indented(Text(system.runs_with)))
            for test in system.tests:
                # Broken at a readable place, if it must be.
                fits = len(test) + _INDENT + 2 <= width
                table.add_row(_indented(Text(test if fits else test.replace("::", "::\n  "), style="dim")))
        tables.append(table)
    return tables


def _indented(text: Text) -> Padding:
    return Padding(text, (0, 0, 0, _INDENT))


def _missing_tables(shown: Sequence[System]) -> list[RenderableType]:
    tables: list[RenderableType] = []
    for letter, members in _by_group(shown):
        table = _table(letter)
        table.add_column(width=_NAME_WIDTH, overflow="fold")
        table.add_column(ratio=1, overflow="fold")
        for system in members:
            cell = Text(system.what)
            if system.context:
                cell.append("\ncontext only: " + system.context, style="dim italic")
            table.add_row(Text(system.name, style="bold"), cell)
        tables.append(table)
    return tables


def _by_group(shown: Iterable[System]) -> Iterable[tuple[str, Iterable[System]]]:
    return groupby(shown, key=lambda system: system.group)


def _table(letter: str) -> Table:
    return Table(
        title=Text(f"({letter}) {GROUPS[letter]}", style="bold cyan"),
        title_justify="left",
        show_header=False,
        box=None,
        padding=(0, 1),
        expand=True,
    )


def _summary(counts: Counter[State]) -> RenderableType:
    total = sum(counts.values())
    text = (
        f"{counts[State.WORKS]} of {total} systems work here; {counts[State.NOT_YET]} do not yet, "
        f"{counts[State.CONTEXT]} are context only (--missing lists these)."
    )
    return Padding(Text(text), (1, 1, 0, 1))


def _detail(system: System) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("group", Text(f"({system.group}) {GROUPS[system.group]}"))
    grid.add_row("what", Text(system.what))
    grid.add_row("state", Text(system.state.value, style="green" if system.state is State.WORKS else "yellow"))
    if system.state is State.WORKS:
        grid.add_row("runs with", Text(system.runs_with))
        grid.add_row("shown by", Text("\n".join(system.tests)))
    if system.context:
        grid.add_row("why", Text(system.context))
    return Group(Text(system.name, style="bold"), Padding(grid, (0, 0, 0, 2)))
