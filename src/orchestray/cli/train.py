"""`orchestray train`: from a config to a trained model."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestray.cli import options
from orchestray.cli.ending import leave_cluster
from orchestray.platform.errors import ConfigError

app = typer.Typer()

_EPILOG = """Examples:

orchestray train configs/train/digits.yaml train.epochs=3 --name quick

orchestray train configs/train/digits.yaml --resume

orchestray train configs/train/digits.yaml train.steps=400 train.epochs=null --replay runs/digits-pbt --name replayed
"""


@app.command(epilog=_EPILOG)
def train(
    config: options.Config,
    overrides: options.Overrides = None,
    *,
    runs_dir: options.RunsDir = options.DEFAULT_RUNS_DIR,
    name: options.Name = None,
    address: options.Address = None,
    resume: options.Resume = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
    plan: Annotated[
        str | None,
        typer.Option(
            "--plan", metavar="auto", help="Train by the fastest plan that keeps the result (orchestray plan)."
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            "--replay",
            metavar="SEARCH_DIR",
            help="Follow the hyper-parameter schedule of that search's winner, in one process.",
        ),
    ] = None,
) -> None:
    """Train a model under the scheme of its config; print progress and, at the end, a table."""
    status = 0
    if plan is not None:
        overrides = _planned(config, overrides or [], plan, replay=replay is not None, resume=resume, quiet=quiet)
    try:
        # Imported here: it is slow to load.
        if replay is not None:
            _check_beside_replay(resume=resume, address=address)
            from orchestray.search.replay import replay as replay_schedule

            run = replay_schedule(config, replay, overrides=overrides or (), runs_dir=runs_dir, name=name, quiet=quiet)
        else:
            from orchestray.trainers.driver.training import train

            run = train(
                config,
                overrides=overrides or (),
                runs_dir=runs_dir,
                name=name,
                address=address,
                resume=resume,
                quiet=quiet,
                started_at=_process_started_at(),
            )
        if as_json:
            _print_json(run.result)
    except KeyboardInterrupt:
        status = 130
    finally:
        leave_cluster()
    raise typer.Exit(status)


def _planned(config: str, overrides: list[str], plan: str, *, replay: bool, resume: bool, quiet: bool) -> list[str]:
    """Return the overrides with those of the best plan, and say which it is."""
    if plan != "auto":
        raise ConfigError(f"--plan takes auto, got {plan}; for another plan, give the keys that orchestray plan shows")
    if replay or resume:
        raise ConfigError("--plan chooses a scheme for a new run; take --resume and --replay out")
    from orchestray.trainers.planning import plan as planning

    best = planning.plan(config, overrides=overrides).best
    if best is None:
        raise ConfigError("--plan auto: no scheme that fits keeps the result; choose one of orchestray plan")
    if not quiet:
        print(f"plan: {best.name}, {1e3 * best.step_s:.3g} ms a step", flush=True)
    return [*overrides, *planning.overrides_of(best)]


def _check_beside_replay(*, resume: bool, address: str | None) -> None:
    given = [option for option, is_there in (("--resume", resume), ("--address", address is not None)) if is_there]
    if given:
        raise ConfigError(f"--replay trains in this process from the first step on; take {' and '.join(given)} out")


def _print_json(result: dict[str, Any]) -> None:
    from orchestray.platform.run.files import dump_json

    print(dump_json(result))
    sys.stdout.flush()


def _process_started_at() -> float:
    """Return the wall-clock time at which this process began, which is when the user's wait began."""
    try:
        with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:  # noqa: PTH123 - not files of a disk
            started_ticks = int(stat.read().rsplit(")", 1)[1].split()[19])
            return time.time() - float(uptime.read().split()[0]) + started_ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.time()
