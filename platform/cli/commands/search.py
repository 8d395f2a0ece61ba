"""`orchestray search`: from a config to the best run that was found."""

from __future__ import annotations

import json
import sys
from importlib import import_module

import typer

from orchestray.platform.cli import options
from orchestray.platform.cli.ending import leave_cluster

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
    """Search hyper-parameters or architectures; prints progress and, at the end, what was found."""
    status = 0
    try:
        # Loaded by name: the platform imports nothing from the rooms that stand on it.
        found = import_module("orchestray.search.api").search(
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
