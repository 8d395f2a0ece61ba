"""`orchestray analyse`: what a step of a model costs, counted without running it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from orchestray.cli.options import Json
from orchestray.platform.terminal.tables import show

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

    from orchestray.trainers.planning.analyse import Analysis, PassCost
    from orchestray.trainers.planning.measured import Measured
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
    predict: Annotated[
        bool,
        typer.Option("--predict", help="The time of a step by models of the literature; needs `orchestray calibrate`."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Count the work, depth and bytes of each layer of a model, forward and backward, before anything runs."""
    import torch  # late

    from orchestray.trainers.planning.analyse import analyse as analysis_of
    from orchestray.trainers.planning.subject import subject_of

    subject = subject_of(source, overrides or (), inputs or ())
    analysis = analysis_of(subject)
    measured = None
    if is_measured:
        from orchestray.trainers.planning.measured import measure

        measured = measure(subject_of(source, overrides or (), inputs or (), device=torch.device("cpu")), analysis)
    predicted_s = _predicted_s(subject) if predict else {}
    if as_json:
        more = {"predicted_s": predicted_s} if predict else {}
        print(json.dumps({**analysis.to_json(), "measured": measured and measured.to_json(), **more}))
        return
    show(_table(analysis))
    for line in _lines(analysis):
        print(line)
    if measured is not None:
        print()
        show(_table_of_times(analysis, measured))
        print()
        print(_sentence_of_ceilings(analysis, measured))
    if predict:
        times = ", ".join(f"{name} {1e3 * time_s:.3g} ms" for name, time_s in predicted_s.items())
        print(f"A step with one thread, by models of the literature: {times}.")


def _table_of_times(analysis: Analysis, measured: Measured) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("layer", overflow="fold")
    for name in ("forward, ms", "of the limit"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("fastest convolution", overflow="fold")
    for layer in analysis.layers:
        if layer.name in measured.forward_s:
            share = measured.limit_share(layer.name, layer.forward)
            times = (f"{measured.forward_s[layer.name] * 1e3:.3g}", f"{share:.0%}")
            table.add_row(layer.name, *times, _fastest(measured.convolutions.get(layer.name, {})))
    return table


def _fastest(times_s: Mapping[str, float]) -> str:
    if not times_s:
        return ""
    fastest, next_one = sorted(times_s, key=times_s.__getitem__)[:2]
    return f"{fastest} ({next_one} takes {times_s[next_one] / times_s[fastest]:.2g} times as long)"


def _sentence_of_ceilings(analysis: Analysis, measured: Measured) -> str:
    limit_s = measured.ceilings.limit_s(analysis.forward) + measured.ceilings.limit_s(analysis.backward)
    rates = (
        f"{measured.ceilings.operations_per_s / 1e9:.3g} G operations and {measured.ceilings.bytes_per_s / 1e9:.3g} GB"
    )
    return (
        f"A step takes {measured.step_s * 1e3:.3g} ms; the limit of this machine is {limit_s * 1e3:.3g} ms: it does "
        f"at most {rates} a second."
    )


def _predicted_s(subject: Subject) -> dict[str, float]:
    from orchestray.trainers.planning.machine import kept
    from orchestray.trainers.survey.cost_models.counted import counted
    from orchestray.trainers.survey.cost_models.models import side_by_side_s

    profile = kept.load()
    return side_by_side_s(counted(subject.forward, subject.model.parameters()), profile)


def _table(analysis: Analysis) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("layer", overflow="fold", min_width=10)
    for name in ("params", "work", "depth", "W/D", "op/byte", "saved", "output"):
        table.add_column(name, justify="right", no_wrap=True)
    for layer in analysis.layers:
        table.add_row(
            f"{layer.name or '-'} {layer.kind}",
            _number(layer.parameters),
            *_cells(layer.forward, layer.backward),
            _bytes(layer.saved_bytes),
            _bytes(layer.output_bytes),
        )
    both = _cells(analysis.forward, analysis.backward)
    table.add_row("all", _number(analysis.parameters), *both, _bytes(analysis.saved_bytes), "", style="bold")
    return table


def _cells(forward: PassCost, backward: PassCost) -> tuple[str, ...]:
    """Return work, depth, parallelism and intensity of a forward and a backward pass."""
    work, depth = forward.work + backward.work, forward.depth + backward.depth
    intensity = work / max(1, forward.num_bytes + backward.num_bytes)
    return _number(work), f"{depth:,}", _number(round(work / max(1, depth))), f"{intensity:.3g}"


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
    parts = [f"{layer} ({depth:,})" for layer, depth in analysis.critical_path if (layer, depth) in deepest]
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
