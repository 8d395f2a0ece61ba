"""`orchestray analyse`: what a step of a model costs, counted without running it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from orchestray.cli.options import Json
from orchestray.platform.terminal.tables import show

if TYPE_CHECKING:
    from rich.console import RenderableType

    from orchestray.trainers.planning.analyse import Analysis, PassCost
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
    predict: Annotated[
        bool,
        typer.Option("--predict", help="The time of a step by models of the literature; needs `orchestray calibrate`."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Count the work, depth and bytes of each layer of a model, forward and backward; nothing is computed."""
    from orchestray.trainers.planning.analyse import analyse as analysis_of  # torch: late
    from orchestray.trainers.planning.subject import subject_of

    subject = subject_of(source, overrides or (), inputs or ())
    analysis = analysis_of(subject)
    predicted_s = _predicted_s(subject) if predict else {}
    if as_json:
        print(json.dumps(analysis.to_json() | ({"predicted_s": predicted_s} if predict else {})))
        return
    show(_table(analysis))
    for line in _lines(analysis):
        print(line)
    if predict:
        times = ", ".join(f"{name} {1e3 * time_s:.3g} ms" for name, time_s in predicted_s.items())
        print(f"A step with one thread, by models of the literature: {times}.")


def _predicted_s(subject: Subject) -> dict[str, float]:
    from orchestray.trainers.planning.machine import kept
    from orchestray.trainers.survey.cost_models.counted import counted
    from orchestray.trainers.survey.cost_models.models import side_by_side_s

    profile = kept.load()
    return side_by_side_s(counted(subject.forward, subject.model.parameters()), profile)


def _table(analysis: Analysis) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("layer", "kind"):
        table.add_column(name, overflow="fold")
    for name in ("parameters", "work", "depth", "work/depth", "bytes", "op/byte", "saved", "output"):
        table.add_column(name, justify="right", no_wrap=True)
    for layer in analysis.layers:
        table.add_row(
            layer.name or "-",
            layer.kind,
            _number(layer.parameters),
            *_cells(layer.forward, layer.backward),
            _bytes(layer.saved_bytes),
            _bytes(layer.output_bytes),
        )
    both = _cells(analysis.forward, analysis.backward)
    table.add_row("all", "", _number(analysis.parameters), *both, _bytes(analysis.saved_bytes), "", style="bold")
    return table


def _cells(forward: PassCost, backward: PassCost) -> tuple[str, ...]:
    """Return work, depth, parallelism, bytes and intensity of a forward and a backward pass."""
    work, depth = forward.work + backward.work, forward.depth + backward.depth
    num_bytes = forward.num_bytes + backward.num_bytes
    return (
        *(_number(work), f"{depth:,}", _number(round(work / max(1, depth)))),
        *(_bytes(num_bytes), f"{work / max(1, num_bytes):.3g}"),
    )


def _lines(analysis: Analysis) -> list[str]:
    forward, backward = analysis.forward, analysis.backward
    passes = {"forward": forward, "backward": backward}
    works = [f"{_number(cost.work)} operations {name} in a depth of {cost.depth:,}" for name, cost in passes.items()]
    busy = [f"{_number(cost.useful_processors)} {name}" for name, cost in passes.items()]
    sent, saved = _bytes(analysis.parameter_bytes), _bytes(analysis.saved_bytes)
    lines = [
        "",
        f"A step of {analysis.batch_size} samples: {works[0]}, {works[1]}.",
        f"Processors that Brent's bound keeps busy for half of the time: {busy[0]}, {busy[1]}.",
        f"Data parallelism adds up {sent} of gradients a step; {saved} are kept for the backward pass.",
        f"The longest chain: {_path(analysis)}.",
    ]
    if analysis.uncounted:
        named = ", ".join(f"{name} ({count})" for name, count in sorted(analysis.uncounted.items()))
        lines.append(f"Not counted, as there is no formula for them: {named}.")
    return [*lines, *(f"Note: {note}." for note in analysis.notes)]


_NUM_NAMED = 8


def _path(analysis: Analysis) -> str:
    deepest = sorted(analysis.critical_path, key=lambda one: -one[1])[:_NUM_NAMED]
    rest = len(analysis.critical_path) - len(deepest)
    parts = [f"{layer} {depth:,}" for layer, depth in analysis.critical_path if (layer, depth) in deepest]
    return ", ".join(parts[:_NUM_NAMED]) + (f", and {rest} more" if rest > 0 else "")


def _number(value: int) -> str:
    for unit, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**4)):
        if value >= size:
            return f"{value / (1000 if unit == 'k' else size):.4g} {unit}"
    return f"{value:,}"


def _bytes(value: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value} B"
