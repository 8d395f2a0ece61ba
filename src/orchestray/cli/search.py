"""`orchestray search`: from a config to the best run of a search."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from orchestray.cli import options
from orchestray.cli.ending import leave_cluster
from orchestray.platform.run.files import dump_json

if TYPE_CHECKING:
    from collections.abc import Sequence

app = typer.Typer()

_EPILOG = """Examples:

orchestray search configs/search/digits-random.yaml search.budget.trials=4 --name quick

orchestray search configs/search/digits-pbt.yaml --resume

orchestray search configs/search/digits-asha.yaml search.parallel=500 search.budget.trials=5000 --simulate
"""
_SIMULATION = "Simulation"
_OF_A_SIMULATION = ("trial_s", "spread")
_OF_A_SEARCH = ("runs_dir", "address", "resume")


@app.command(epilog=_EPILOG)
def search(
    context: typer.Context,
    config: options.Config,
    overrides: options.Overrides = None,
    *,
    runs_dir: options.RunsDir = options.DEFAULT_RUNS_DIR,
    name: options.Name = None,
    address: options.Address = None,
    resume: options.Resume = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate",
            help="Train nothing: say how busy the method keeps search.parallel workers, in virtual time.",
            rich_help_panel=_SIMULATION,
        ),
    ] = False,
    trial_s: Annotated[
        float, typer.Option(min=1e-6, help="Mean time of a trial, in seconds.", rich_help_panel=_SIMULATION)
    ] = 3600.0,
    spread: Annotated[
        float,
        typer.Option(min=0, help="Standard deviation of its logarithm; 0.3: about 30 %.", rich_help_panel=_SIMULATION),
    ] = 0.3,
) -> None:
    """Search hyper-parameters or architectures; print progress and, at the end, the best result."""
    _check_options(context, simulate=simulate)
    if simulate:
        _simulate(config, overrides or (), trial_s, spread, as_json=as_json)
        return
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
            print(dump_json(found.result))
            sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    finally:
        leave_cluster()
    raise typer.Exit(status)


def _check_options(context: typer.Context, *, simulate: bool) -> None:
    """Refuse options that would have no effect."""
    from orchestray.platform.errors import ConfigError

    sources = {name: context.get_parameter_source(name) for name in (*_OF_A_SIMULATION, *_OF_A_SEARCH)}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    others = [
        f"--{name.replace('_', '-')}" for name in given if name in (_OF_A_SEARCH if simulate else _OF_A_SIMULATION)
    ]
    if others and simulate:
        raise ConfigError(f"--simulate trains nothing and writes no files: leave out {', '.join(others)}")
    if others:
        raise ConfigError(f"{', '.join(others)}: only a simulation has that; add --simulate")


def _simulate(config: str, overrides: Sequence[str], trial_s: float, spread: float, *, as_json: bool) -> None:
    from orchestray.search.config.load import load_search_config
    from orchestray.search.simulation.occupancy import occupancy_of

    found, _ = occupancy_of(load_search_config(config, overrides), trial_s=trial_s, spread=spread)
    if as_json:
        print(dump_json(found.to_json()))
        return
    print(f"{found.method} in virtual time: trials of {trial_s:g} s in the mean, spread {spread:g}")
    for title, value in (
        ("workers", f"{found.workers:,}"),
        ("trials begun", f"{found.trials:,}"),
        ("trials ended", f"{found.ended:,}"),
        ("hours", f"{found.hours:,.4g}"),
        ("busy, in all", f"{found.utilisation:.1%}"),
        ("busy, until the last trial began", f"{found.utilisation_until_last:.1%}"),
        ("trials ended in an hour", f"{found.trials_per_hour:,.4g}"),
        ("the method, ms a trial", f"{found.method_ms:.3g}"),
    ):
        print(f"  {title:<34}{value:>10}")
