"""`orchestray runs average`: one model made of a run's last checkpoints."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestray.cli.options import DEFAULT_RUNS_DIR, Json, RunsDir

EPILOG = """Examples:

orchestray runs average digits --last 3

orchestray runs average digits --ensemble --name digits-of-all
"""


def average_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The run's name, or its directory.", show_default=False)],
    *,
    last: Annotated[
        int | None,
        typer.Option("--last", metavar="K", help="Of so many checkpoints, the newest; default: of all that are kept."),
    ] = None,
    ensemble: Annotated[
        bool, typer.Option("--ensemble", help="Have them answer together in place of averaging their weights.")
    ] = False,
    new_name: Annotated[
        str | None,
        typer.Option("--name", metavar="NEW", help="Name of the run that is written; default: NAME-average."),
    ] = None,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
    as_json: Json = False,
) -> None:
    """Write a run whose model is the mean of the weights of a run's last checkpoints, or an ensemble of them.

    Statistics of batch normalisation are measured again on the training data. The model is validated.
    """
    from orchestray.platform.errors import ConfigError
    from orchestray.trainers.saved.run import load_run

    if last is not None and last < 1:
        raise ConfigError(f"orchestray runs average: --last must be 1 or more, got {last}")
    run = load_run(name if "/" in name else runs_dir / name)
    from orchestray.trainers.driver.averaged_run import write_average

    written = write_average(
        run,
        name=new_name or f"{run.name}-{'ensemble' if ensemble else 'average'}",
        runs_dir=run.path.parent,
        last=last,
        as_ensemble=ensemble,
    )
    if as_json:
        from orchestray.platform.run.files import dump_json

        print(dump_json({"name": written.name, "path": str(written.path), **written.result}))
        return
    from orchestray.platform.terminal.format import metrics_text

    averaged = written.result["averaged"]
    steps = ", ".join(str(step) for step in averaged["steps"])
    print(f"{written.name}: the mean {averaged['what']} of {run.name} at the steps {steps}")
    if (validation := written.result["final"]["validation"]) is not None:
        print(f"validation  {metrics_text(validation)}")
    print(f"Wrote {written.path}.")
