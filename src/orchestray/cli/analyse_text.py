"""The tables and sentences of `orchestray analyse`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

    from orchestray.trainers.planning.analyse import Analysis, LayerCost, PassCost
    from orchestray.trainers.planning.measured import Measured
    from orchestray.trainers.planning.micro_batching import MicroBatching


Column = tuple[str, "Callable[[LayerCost], str]"]


def columns_of(analysis: Analysis) -> list[Column]:
    """Return the columns of numbers of a table of layers; those of splits only if there is something to split."""
    return [*_COSTS, *_splits(analysis)]


def _of_passes(place: int) -> Callable[[LayerCost], str]:
    return lambda layer: cells(layer.forward, layer.backward)[place]


_COSTS: list[Column] = [
    ("params", lambda layer: number(layer.parameters)),
    *((name, _of_passes(place)) for place, name in enumerate(("work", "depth", "W/D", "op/byte"))),
    ("saved", lambda layer: size(layer.saved_bytes)),
    ("output", lambda layer: size(layer.output_bytes)),
]


def _splits(analysis: Analysis) -> list[Column]:
    columns: list[Column] = []
    if any(layer.halo_bytes for layer in analysis.layers):
        columns.append(("halo", lambda layer: size(layer.halo_bytes) if layer.halo_bytes else ""))
    if any(layer.tensor_bytes for layer in analysis.layers):
        columns.append(("tensor", lambda layer: size(layer.tensor_bytes) if layer.tensor_bytes else ""))
    return columns


def totals_of(analysis: Analysis, columns: Sequence[Column]) -> list[str]:
    """Return the last row of a table of layers, one text for each of its columns."""
    layers = analysis.layers
    sums = {"halo": sum(layer.halo_bytes for layer in layers), "tensor": sum(layer.tensor_bytes for layer in layers)}
    known = {
        "params": number(analysis.parameters),
        **dict(zip(("work", "depth", "W/D", "op/byte"), cells(analysis.forward, analysis.backward), strict=True)),
        "saved": size(analysis.saved_bytes),
        **{name: size(value) for name, value in sums.items()},
    }
    return [known.get(name, "") for name, _ in columns]


def table_of_layers(analysis: Analysis) -> RenderableType:
    """Return a row for each layer, and one for all."""
    return _table(analysis, analysis.layers, _COSTS)


def table_of_splits(analysis: Analysis) -> RenderableType | None:
    """Return a row for each layer for which workers send something to each other; None if there is none."""
    if not (columns := _splits(analysis)):
        return None
    return _table(analysis, [layer for layer in analysis.layers if layer.halo_bytes or layer.tensor_bytes], columns)


def _table(analysis: Analysis, layers: Sequence[LayerCost], columns: Sequence[Column]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("layer", overflow="fold", min_width=10)
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for layer in layers:
        table.add_row(f"{layer.name or '-'} {layer.kind}", *(cell(layer) for _, cell in columns))
    table.add_row("all", *totals_of(analysis, columns), style="bold")
    return table


TIMES = ("forward, ms", "of limit", "backward, ms", "of limit")
"""Names of the columns of a layer's times."""


def table_of_times(analysis: Analysis, measured: Measured) -> RenderableType:
    """Return the measured times of each layer's passes, and the fastest algorithm of each convolution."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("layer", overflow="fold")
    for name in TIMES:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("fastest convolution", overflow="fold")
    for row in rows_of_times(analysis, measured):
        table.add_row(*row)
    return table


def rows_of_times(analysis: Analysis, measured: Measured) -> list[Sequence[str]]:
    """Return the rows of that table."""
    return [
        (
            layer.name,
            *_time_of(measured, layer.forward, measured.forward_s[layer.name]),
            *_time_of(measured, layer.backward, measured.backward_s.get(layer.name)),
            _fastest(measured.convolutions.get(layer.name, {})),
        )
        for layer in analysis.layers
        if layer.name in measured.forward_s
    ]


def _time_of(measured: Measured, cost: PassCost, seconds: float | None) -> tuple[str, str]:
    """Return the time of a pass, and the part of the limit that it reaches."""
    if seconds is None:
        return "-", "-"
    return _milliseconds(seconds), f"{measured.ceilings.reached(cost, seconds):.0%}"


def _fastest(times_s: Mapping[str, float]) -> str:
    from orchestray.trainers.survey.operators.autotuner import fastest  # late: it imports torch

    if not times_s:
        return ""
    first = fastest(times_s)
    if first is None:
        return "none keeps to the limit"
    next_one = fastest({name: seconds for name, seconds in times_s.items() if name != first})
    if next_one is None:
        return first
    return f"{first} ({next_one} takes {times_s[next_one] / times_s[first]:.2g} times as long)"


def sentence_of_ceilings(analysis: Analysis, measured: Measured) -> str:
    """Return how long a step takes, and the limit of this machine."""
    limit_s = measured.ceilings.limit_s(analysis.forward) + measured.ceilings.limit_s(analysis.backward)
    rates = (
        f"{measured.ceilings.operations_per_s / 1e9:.3g} G operations and {measured.ceilings.bytes_per_s / 1e9:.3g} GB"
    )
    step, limit = _milliseconds(measured.step_s), _milliseconds(limit_s)
    return f"A step takes {step} ms; the limit of this machine is {limit} ms: it does at most {rates} a second."


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 1 else f"{seconds * 1e3:.3g}"


def cells(forward: PassCost, backward: PassCost) -> tuple[str, ...]:
    """Return work, depth, parallelism and intensity of a forward and a backward pass."""
    work, depth = forward.work + backward.work, forward.depth + backward.depth
    intensity = work / max(1, forward.num_bytes + backward.num_bytes)
    return number(work), f"{depth:,}", number(round(work / max(1, depth))), f"{intensity:.3g}"


def lines_of(analysis: Analysis) -> list[str]:
    """Return the sentences below the table."""
    forward, backward = analysis.forward, analysis.backward
    passes = {"forward": forward, "backward": backward}
    works = [f"{number(cost.work)} operations {name} in a depth of {cost.depth:,}" for name, cost in passes.items()]
    times = [
        f"{number(round(each.least))} to {number(round(each.most))} on {each.processors:,}"
        for each in analysis.bounds
        if each.processors > 1
    ]
    busy = [f"{number(cost.useful_processors)} {name}" for name, cost in passes.items()]
    sent, saved = size(analysis.parameter_bytes), size(analysis.saved_bytes)
    return [
        f"A step of {step_of(analysis)}: {works[0]}, {works[1]}.",
        f"On p processors it takes from max(W/p, D) to W/p + D operations one after the other: {', '.join(times)}.",
        f"Processors that Brent's bound keeps busy for half of the time: {busy[0]}, {busy[1]}.",
        f"Data parallelism adds up {sent} of gradients a step; {saved} are kept for the backward pass.",
        *recomputation_lines(analysis),
        *traffic_lines(analysis),
        *sentence_of_schemes(analysis),
        *padding_lines(analysis),
        f"The longest chain: {_path(analysis)}.",
        *remarks_of(analysis),
    ]


def step_of(analysis: Analysis) -> str:
    """Return what a step is of: samples, or inputs of some shapes."""
    if analysis.is_of_samples:
        return f"{analysis.batch_size} sample{'s' if analysis.batch_size != 1 else ''}"
    return f"inputs {' and '.join(analysis.inputs)}"


def recomputation_lines(analysis: Analysis) -> list[str]:
    """Return a sentence for each way of recomputation."""
    whole = analysis.forward.work + analysis.backward.work
    return [
        f"train.recompute: {each.how} would keep {size(each.peak_bytes)}, in {len(each.parts)} parts, for "
        f"{each.work / max(1, whole) - 1:.0%} more operations."
        for each in analysis.recomputations
    ]


def traffic_lines(analysis: Analysis) -> list[str]:
    """Return a sentence for each plan of a split over two workers."""
    return [
        f"Split over {each.degree} workers by strategy.network.plan: {each.kind}, each sends {size(each.num_bytes)} a "
        f"step and holds {number(each.parameters)} parameters."
        for each in analysis.traffic
    ]


def sentence_of_schemes(analysis: Analysis) -> list[str]:
    """Return a sentence on the layers that send less if samples are divided, or if features are; none without both."""
    auto = next((each for each in analysis.traffic if each.kind == "auto"), None)
    if auto is None or not auto.gradient_bytes:
        return []
    by_scheme = {
        scheme: ", ".join(name for name, chosen in auto.schemes.items() if chosen == scheme) or "none"
        for scheme in ("samples", "features")
    }
    line = (
        f"Layer by layer, two workers send least with divided samples (data parallelism) for {by_scheme['samples']}, "
        f"and with divided features for {by_scheme['features']}."
    )
    return [line]


def sentence_of_micro_batches(found: MicroBatching) -> str:
    """Return the number of micro-batches that was found, and what they keep."""
    return (
        f"train.accumulate: {found.accumulate} keeps at most {size(found.peak_bytes)} for the backward pass, in "
        f"micro-batches of {found.num_samples} samples or fewer, on one worker."
    )


def _times(factor: float) -> str:
    return "no more" if factor < 1.005 else f"{factor:.3g} times as many"


def padding_lines(analysis: Analysis) -> list[str]:
    """Return a sentence on units that take sizes in multiples of a number, if there are products of matrices."""
    if not analysis.padding:
        return []
    costs = [f"{_times(each.factor)} on {each.unit} ({each.multiple})" for each in analysis.padding]
    last = analysis.padding[-1]
    most = f", most of it in {last.worst or 'the model itself'}" if last.worst_added else ""
    plain = number(last.multiplications)
    return [f"With sizes of matrices padded to a multiple, {plain} multiplications become {', '.join(costs)}{most}."]


def remarks_of(analysis: Analysis) -> list[str]:
    """Return what was not counted, and what else a reader has to know."""
    lines = []
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


def number(value: int) -> str:
    """Return a count with four digits, and its unit."""
    for unit, factor in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**4)):
        if value >= factor:
            return f"{value / (1000 if unit == 'k' else factor):.4g} {unit}"
    return f"{value:,}"


def size(value: int) -> str:
    """Return a number of bytes with four digits, and its unit."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if value >= factor:
            return f"{value / factor:.4g} {unit}"
    return f"{value} B"
