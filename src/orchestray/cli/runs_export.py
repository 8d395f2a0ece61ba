"""`orchestray runs export`: a run in the files of another program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestray.cli.options import DEFAULT_RUNS_DIR, Json, RunsDir

EPILOG = """Examples:

orchestray runs export digits --mlflow mlruns

orchestray runs export digits --mlflow mlruns --experiment digits
"""


def export_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The run's name, or its directory.", show_default=False)],
    *,
    mlflow: Annotated[
        Path, typer.Option("--mlflow", metavar="DIR", help="MLflow's file store, e.g. mlruns.", show_default=False)
    ],
    experiment: Annotated[
        str, typer.Option("--experiment", metavar="EXPERIMENT", help="MLflow's experiment that gets it.")
    ] = "orchestray",
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
    as_json: Json = False,
) -> None:
    """Write a run into MLflow's file store: its config as parameters, its metrics with their history, its model.

    Exporting the same run again replaces the earlier export. mlflow itself is not needed.
    """
    from orchestray.trainers.saved.mlflow_export import export_to_mlflow
    from orchestray.trainers.saved.run import load_run

    run = load_run(name if "/" in name else runs_dir / name)
    exported = export_to_mlflow(run, mlflow, experiment=experiment)
    if as_json:
        from orchestray.platform.run.files import dump_json

        exported_run = {"name": run.name, "path": str(exported.path), "experiment_id": exported.experiment_id}
        counts = {"params": exported.num_params, "metrics": exported.num_metrics}
        print(dump_json({**exported_run, "run_id": exported.run_id, **counts}))
        return
    print(f"{run.name}: {exported.num_params} parameters, {exported.num_metrics} metrics")
    print(f"Wrote {exported.path}.")
