"""`orchestray analyse`: what a step of a model costs, counted without running it."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestray.cli.analyse_text import (
    lines_of,
    sentence_of_ceilings,
    sentence_of_micro_batches,
    table_of_layers,
    table_of_splits,
    table_of_times,
)
from orchestray.cli.options import Json
from orchestray.platform.run.files import dump_json, storage_errors, write_atomic
from orchestray.platform.terminal.tables import show

if TYPE_CHECKING:
    from orchestray.trainers.planning.subject import Subject

app = typer.Typer()


@app.command(epilog="Example: orchestray analyse configs/train/digits-cnn.yaml train.batch_size=64")
def analyse(
    source: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|FILE.PY:CLASS",
            help="A train config, a task, or a module.",
            show_default=False,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY.PATH=VALUE", help="Keys to set after the config is read.", show_default=False),
    ] = None,
    *,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--inputs",
            metavar="SHAPE",
            help="Shape of a module's input, as 8,3,224,224 or 8,128:int64; repeatable.",
        ),
    ] = None,
    is_measured: Annotated[
        bool, typer.Option("--measure", help="Run the layers as well, and each algorithm for each convolution.")
    ] = False,
    limit_mb: Annotated[
        float,
        typer.Option(
            "--limit-mb",
            metavar="MB",
            min=0,
            help="Memory that an algorithm may need beside inputs and outputs, with --measure.",
        ),
    ] = 1000.0,
    predict: Annotated[
        bool,
        typer.Option("--predict", help="The time of a step by models of the literature; needs `orchestray calibrate`."),
    ] = False,
    activation_mb: Annotated[
        float | None,
        typer.Option(
            "--activation-mb",
            metavar="MB",
            help="Find the fewest micro-batches (train.accumulate) whose activations take no more.",
            min=0,
        ),
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with the longest chain drawn.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Count the work, depth and bytes of each layer of a model, forward and backward, before anything runs."""
    import torch  # late

    from orchestray.trainers.planning.analyse import analyse as analysis_of
    from orchestray.trainers.planning.subject import subject_of

    def subject(device: str) -> Subject:
        return subject_of(source, overrides or (), inputs or (), device=torch.device(device))

    measured = None
    if is_measured:
        from orchestray.trainers.machine import kept
        from orchestray.trainers.planning.measured import analysed_on, measure
        from orchestray.trainers.survey.operators.autotuner import KeptTimes

        analysis = analysed_on(subject)
        tried_before = KeptTimes(
            kept.cache_directory() / "convolutions", {**kept.versions(), "processor": kept.processor()}
        )
        measured = measure(subject("cpu"), analysis, limit_bytes=round(1e6 * limit_mb), kept=tried_before)
    else:
        analysis = analysis_of(subject("meta"))
    if page is not None:
        from orchestray.cli.analyse_page import page_of

        with storage_errors(f"write {page}"):
            write_atomic(page, page_of(analysis, measured).encode())
        print(f"Written: {page}", file=sys.stderr)
    predicted_s = _predicted_s(subject("meta")) if predict else {}
    micro_batching = None
    if activation_mb is not None:
        from orchestray.trainers.planning.micro_batching import fewest_micro_batches

        micro_batching = fewest_micro_batches(subject("meta"), 1e6 * activation_mb)
    if as_json:
        more: dict[str, Any] = {"predicted_s": predicted_s} if predict else {}
        if micro_batching is not None:
            more["micro_batching"] = asdict(micro_batching)
        print(dump_json({**analysis.to_json(), "measured": measured and measured.to_json(), **more}))
        return
    show(table_of_layers(analysis))
    print()
    if (splits := table_of_splits(analysis)) is not None:
        show(splits)
        print()
    for line in lines_of(analysis):
        print(line)
    if micro_batching is not None:
        print(sentence_of_micro_batches(micro_batching))
    if measured is not None:
        print()
        show(table_of_times(analysis, measured))
        print()
        print(sentence_of_ceilings(analysis, measured))
    if predict:
        times = ", ".join(f"{name} {1e3 * time_s:.3g} ms" for name, time_s in predicted_s.items())
        print(f"A step with one thread, by models of the literature: {times}.")


def _predicted_s(subject: Subject) -> dict[str, float]:
    from orchestray.trainers.machine import kept
    from orchestray.trainers.survey.cost_models.counted import counted
    from orchestray.trainers.survey.cost_models.models import side_by_side_s

    profile = kept.load()
    return side_by_side_s(counted(subject.forward, subject.model.parameters()), profile)
