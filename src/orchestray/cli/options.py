"""Options shared by several commands, so that they have the same name and help text everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_RUNS_DIR = Path("runs")

RunsDir = Annotated[
    Path, typer.Option("--runs-dir", metavar="DIR", file_okay=False, help="Where the run directories are.")
]
Name = Annotated[str | None, typer.Option("--name", metavar="NAME", help="Name of the run, in place of the config's.")]
Address = Annotated[
    str | None,
    typer.Option("--address", metavar="ADDR", help="A Ray cluster that runs already; default: start one here."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run of that name.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress display.")]
Json = Annotated[bool, typer.Option("--json", help="The result as JSON, as the last line of stdout.")]
Config = Annotated[str, typer.Argument(metavar="CONFIG", help="The YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY.PATH=VALUE", help="Keys to set after the file is read; values are YAML.", show_default=False
    ),
]
