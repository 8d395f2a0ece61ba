"""`orchestray runs scale`: a change of the number of workers of a live run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from orchestray.cli.options import DEFAULT_RUNS_DIR, Json, RunsDir

EPILOG = """Examples:

orchestray runs scale digits --data 4

orchestray runs scale digits --data 1 --runs-dir /shared/runs
"""

_TIMEOUT_S = 180.0
_STATES = {"died": "no process writes it any more", "interrupted": "it was interrupted"}


def scale_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The run's name, or its directory.", show_default=False)],
    *,
    data: Annotated[
        int,
        typer.Option(
            "--data",
            metavar="N",
            help="Replicas it shall have from now on (strategy.network.data), each of tensor x pipeline workers.",
            show_default=False,
        ),
    ],
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.0, help="How long to wait until it is done.")
    ] = _TIMEOUT_S,
    as_json: Json = False,
) -> None:
    """Change the number of workers of a live run, and wait until it continues with them.

    The run loses no step and repeats none. Under a parameter server workers come and go while the others continue.
    Under any other exchange all pause between two steps, to save a checkpoint and to form a new group.
    """
    from orchestray.platform.errors import ConfigError, Interrupted
    from orchestray.trainers.driver.runlog.scale_requests import RefusedError, ask_to_scale
    from orchestray.trainers.saved.run import load_run

    run = load_run(name if "/" in name else runs_dir / name)
    if data < 1:
        raise ConfigError(f"orchestray runs scale: --data must be 1 or more, got {data}")
    if run.status != "running":
        state = _STATES.get(run.status, f"it has {run.status}")
        raise RefusedError(
            f"Run '{run.name}' is not under way: {state}. What is left to do of it can be done with as many: "
            f"orchestray train {run.path}/config.yaml strategy.network.data={data} --resume "
            f"--runs-dir {run.path.parent}"
        )
    try:
        answer = ask_to_scale(run.path, data, timeout_s)
    except KeyboardInterrupt:
        raise Interrupted(
            f"Not waiting any longer. If run '{run.name}' had taken the request up, it goes on with it."
        ) from None
    if as_json:
        from orchestray.platform.run.files import dump_json

        print(dump_json({"name": run.name, **answer}))
    else:
        print(_sentence(run.name, answer))


def _sentence(name: str, answer: dict[str, Any]) -> str:
    before, after = answer["before"], answer["after"]
    workers = "worker" if answer["workers_after"] == 1 else "workers"
    text = f"{name}: {answer['workers_before']} -> {answer['workers_after']} {workers} at step {answer['step']}"
    return text if before == answer["workers_before"] else f"{text} (data: {before} -> {after})"
