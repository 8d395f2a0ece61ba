"""`orchestray search`: from a config to the best run of a search."""

from __future__ import annotations

import json
import sys

import typer

from orchestray.cli import options
from orchestray.cli.ending import leave_cluster

app = typer.Typer()

_EPILOG = """Examples:

orchestray search configs/search/digits-random.yaml search.budget.trials=4 --name quick

orchestray search configs/search/digits-pbt.yaml --resume
"""


@app.command(epilog=_EPILOG)
def search(
    config: options.Config,
    overrides: options.Overrides = None,
    *,
    runs_dir: options.RunsDir = options.DEFAULT_RUNS_DIR,
    name: options.Name = None,
    address: options.Address = None,
    resume: options.Resume = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Search hyper-parameters or architectures; print progress and, at the end, the best result."""
    status = 0
    try:
        # Imported here: it is slow to load.
        from orchestray.search.api import search

        found = search(
            config,
            overrides=overrides or (),
            runs_dir=runs_dir,
            name=name,
            address=address,
            resume=resume,
            quiet=quiet,
        )
        if as_json:
            print(json.dumps(found.result))
            sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    finally:
        leave_cluster()
    raise typer.Exit(status)
