"""`orchestray lab`: the survey's operators, measured on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from orchestray.cli.options import Json
from orchestray.platform.errors import ConfigError
from orchestray.platform.run.files import dump_json
from orchestray.platform.terminal.tables import show

if TYPE_CHECKING:
    from orchestray.trainers.survey.lab.exhibit import Exhibit

app = typer.Typer()


@app.command(epilog="Example: orchestray lab gemm")
def lab(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The experiment; none: list them.", show_default=False)
    ] = None,
    *,
    rounds: Annotated[
        int | None, typer.Option("--rounds", metavar="N", min=1, help="Rounds of the timings.", show_default=False)
    ] = None,
    num_threads: Annotated[
        int, typer.Option("--threads", metavar="N", min=1, help="Threads of torch; `threads` takes its own.")
    ] = 1,
    as_json: Json = False,
) -> None:
    """Compare ways to compute the same operator on this machine: times, errors, words moved."""
    from orchestray.trainers.machine import kept
    from orchestray.trainers.survey.lab.registry import EXPERIMENTS  # late: it imports torch
    from orchestray.trainers.survey.lab.timing import threads

    if name is None:
        if as_json:
            print(dump_json({each: experiment.line for each, experiment in EXPERIMENTS.items()}))
        else:
            _list({each: experiment.line for each, experiment in EXPERIMENTS.items()})
        return
    if name not in EXPERIMENTS:
        raise ConfigError(f"There is no experiment {name!r}; there are {', '.join(EXPERIMENTS)}.")
    if num_threads > (most := kept.cores()):  # many more than that end the process, without a word
        raise ConfigError(f"--threads: this machine has {most} cores, got {num_threads}")
    experiment = EXPERIMENTS[name]
    with threads(num_threads):
        exhibit = experiment.run(rounds or experiment.rounds)
    if as_json:
        print(dump_json(exhibit.to_json()))
        return
    _show(exhibit)


def _list(lines: dict[str, str]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for name, line in lines.items():
        table.add_row(name, line)
    show(table)


def _show(exhibit: Exhibit) -> None:
    """Show the table; one with many columns is turned, so that each row is a column where there is room for it."""
    from rich.table import Table

    print(exhibit.title)
    print()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    rows = exhibit.texts()
    is_turned = len(exhibit.columns) > len(rows)
    header = [exhibit.columns[0], *(row[0] for row in rows)] if is_turned else exhibit.columns
    body = [list(cells) for cells in zip(exhibit.columns, *rows, strict=True)][1:] if is_turned else rows
    for place, column in enumerate(header):
        table.add_column(column, justify="right" if place else "left", overflow="fold")
    for row in body:
        table.add_row(*row)
    show(table)
    print()
    for finding in exhibit.findings:
        print(finding)
