"""`orchestray advise`: whether to distribute a training, with or without a server, and how consistent it should be."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from orchestray.cli.options import Json
from orchestray.platform.run.files import dump_json

app = typer.Typer()


@app.command(epilog="Example: orchestray advise configs/train/digits.yaml --workers 8 --device-gb 16")
def advise(
    source: Annotated[
        str,
        typer.Argument(metavar="CONFIG|FILE.PY:CLASS", help="A train config, a task, or a module.", show_default=False),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY.PATH=VALUE", help="Keys to set after the config is read.", show_default=False),
    ] = None,
    *,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--inputs", metavar="SHAPE", help="Shape of a module's input, as 8,3,224,224; repeatable."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Training samples; default: those of the task, or of one batch.")
    ] = None,
    device_gb: Annotated[
        float | None, typer.Option(min=1e-9, help="Memory of a device; default: that of this machine.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=100_000, help="Workers that there could be.")] = 8,
    latency_us: Annotated[float, typer.Option(min=0, help="Latency between workers.")] = 30.0,
    gbit_s: Annotated[float, typer.Option(min=1e-6, help="Bandwidth between workers.")] = 100.0,
    speed_spread: Annotated[float, typer.Option(min=0, help="Spread of the workers' speeds.")] = 0.0,
    slow_steps: Annotated[float, typer.Option(min=0, max=1, help="Part of a worker's steps that is slow.")] = 0.0,
    slow_factor: Annotated[float, typer.Option(min=1, help="How many times as long those take.")] = 5.0,
    elastic: Annotated[bool, typer.Option("--elastic", help="Workers come and go.")] = False,
    no_centre: Annotated[bool, typer.Option("--no-centre", help="No process may be one that all depend on.")] = False,
    as_json: Json = False,
) -> None:
    """Say whether to distribute a training, with or without a server, and how consistent its workers should be."""
    import psutil  # late, as all of these

    from orchestray.platform.comm.allreduce.costs import AlphaBeta
    from orchestray.trainers.planning import advice
    from orchestray.trainers.planning.advised import sizes_of
    from orchestray.trainers.survey.cluster.stragglers import Compute

    sizes = sizes_of(source, overrides or (), inputs or (), samples)
    device_bytes = 1e9 * device_gb if device_gb else float(psutil.virtual_memory().total)
    distributed = advice.when_to_distribute(sizes.memory, device_bytes)
    consistent = advice.which_consistency(Compute(1.0, speed_spread, slow_steps, slow_factor), workers)
    needs = advice.Needs(consistent.choice != "synchronous", elastic, no_centre)
    link = AlphaBeta(latency_us * 1e-6, 8e-9 / gbit_s)
    centred = advice.centralised_or_not(workers, sizes.parameter_bytes, link, needs)
    if as_json:
        answers: dict[str, Any] = {"distribute": distributed, "consistency": consistent, "centre": centred}
        print(
            dump_json(
                {"samples": sizes.num_samples} | {name: dataclasses.asdict(each) for name, each in answers.items()}
            )
        )
        return
    parts = f" in {distributed.least_parts} parts or more" if distributed.least_parts > 1 else ""
    print(f"Distribute: {distributed.choice}{parts}. {distributed.reason[0].upper()}{distributed.reason[1:]}.")
    print(f"With {workers} workers, if it is distributed:")
    print(f"  consistency: {consistent.choice}; {consistent.reason}.")
    times = (
        f"a server takes {1e3 * centred.server_s:.3g} ms a step, {centred.algorithm} {1e3 * centred.all_reduce_s:.3g}"
    )
    print(f"  gradients: {centred.choice}; {centred.reason} ({times}).")
