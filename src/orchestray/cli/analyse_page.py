"""The page of `orchestray analyse --html`: the longest chain drawn, and tables. It loads nothing from the network."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

from orchestray.cli.analyse_text import (
    TIMES,
    columns_of,
    lines_of,
    number,
    remarks_of,
    rows_of_times,
    sentence_of_ceilings,
    size,
    step_of,
    totals_of,
)
from orchestray.search.results.report import asset

if TYPE_CHECKING:
    from orchestray.trainers.planning.analyse import Analysis, Interval
    from orchestray.trainers.planning.measured import Measured


def page_of(analysis: Analysis, measured: Measured | None = None) -> str:
    """Return the page as HTML.

    Args:
        analysis: what to show.
        measured: times of the layers, if they were measured.
    """
    template = (files("orchestray.cli") / "analyse.html").read_text(encoding="utf-8")
    return Template(template).substitute(
        title=html.escape(analysis.name),
        style=asset("report.css"),
        about=html.escape(f"A training step of {step_of(analysis)}: {lines_of(analysis)[0].partition(': ')[2]}"),
        tiles="".join(_tile(name, value) for name, value in _tiles(analysis)),
        chain=_chain(analysis),
        layers=_layers(analysis),
        times=_times(analysis, measured),
        recomputation=_recomputation(analysis),
        traffic=_traffic(analysis),
        remarks="".join(f'<p class="hint">{html.escape(line)}</p>' for line in remarks_of(analysis)),
    )


def _tiles(analysis: Analysis) -> list[tuple[str, str]]:
    forward, backward = analysis.forward, analysis.backward
    work, depth = forward.work + backward.work, forward.depth + backward.depth
    return [
        ("parameters", number(analysis.parameters)),
        ("operations", number(work)),
        ("depth", f"{depth:,}"),
        ("operations at a time, on average", number(round(work / max(1, depth)))),
        ("kept for the backward pass", size(analysis.saved_bytes)),
        ("gradients a step", size(analysis.parameter_bytes)),
    ]


def _tile(name: str, value: str) -> str:
    return f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>'


def _chain(analysis: Analysis) -> str:
    """Return a row for each layer, with the depths at which its passes begin and end."""
    by_layer: dict[str, list[Interval]] = {layer.name: [] for layer in analysis.layers}
    for interval in analysis.intervals:
        by_layer.setdefault(interval.layer, []).append(interval)
    end = max((interval.end for interval in analysis.intervals), default=1)
    rows = []
    for layer, intervals in by_layer.items():
        if not intervals:
            continue
        bars = "".join(_bars(interval, end) for interval in intervals)
        name = html.escape(layer or "-")
        is_on_path = any(interval.on_path for interval in intervals)
        rows.append(
            f'<div class="lane{"" if is_on_path else " beside"}"><span title="{name}"><bdi>{name}</bdi></span>'
            f'<div class="track">{bars}</div></div>'
        )
    return "".join(rows)


def _bars(interval: Interval, end: int) -> str:
    """Return the whole of a pass as a pale bar, and the parts of it on the longest chain as full ones."""
    which = "backward" if interval.is_backward else "forward"
    depth = sum(stop - start for start, stop in interval.on_path)
    title = f"{interval.layer or '-'}, {which}: {interval.begin:,} to {interval.end:,}" + (
        f", {depth:,} on the longest chain" if depth else ""
    )
    pale = _bar(f"{which} pale", interval.begin, interval.end, end, title)
    return pale + "".join(_bar(which, start, stop, end, title) for start, stop in interval.on_path)


def _bar(kind: str, start: int, stop: int, end: int, title: str) -> str:
    left, width = 100 * start / end, 100 * (stop - start) / end
    return f'<i class="{kind}" style="left:{left:.3f}%;width:{width:.3f}%" title="{html.escape(title)}"></i>'


def _layers(analysis: Analysis) -> str:
    columns = columns_of(analysis)
    rows = [[f"{layer.name or '-'}", layer.kind, *(cell(layer) for _, cell in columns)] for layer in analysis.layers]
    return _table(
        ["layer", "", *(name for name, _ in columns)], rows, ["all", "", *totals_of(analysis, columns)], texts=2
    )


def _times(analysis: Analysis, measured: Measured | None) -> str:
    if measured is None:
        return ""
    names = list(dict.fromkeys(name for times in measured.convolutions.values() for name in times))
    found = {row[0]: row for row in rows_of_times(analysis, measured)}
    table = _table(["layer", *TIMES], [row[: 1 + len(TIMES)] for row in found.values()], texts=1)
    sentence = html.escape(sentence_of_ceilings(analysis, measured))
    text = f"<section><h2>Measured</h2><p>{sentence}</p>{_roofline(analysis, measured)}{table}</section>"
    if names:
        rows = [
            [layer, *("-" if times[name] == float("inf") else f"{times[name] * 1e3:.3g}" for name in names)]
            for layer, times in measured.convolutions.items()
        ]
        table = _table(["layer", *names], rows, texts=1)
        text += f"<section><h2>Each convolution by each algorithm, ms</h2>{table}</section>"
    return text


def _roofline(analysis: Analysis, measured: Measured) -> str:
    """Return a plot of the forward passes: operations a byte across, operations a second upwards, on scales of logs."""
    points = [
        (layer.name, layer.forward.intensity, layer.forward.work / measured.forward_s[layer.name])
        for layer in analysis.layers
        if layer.name in measured.forward_s and layer.forward.work
    ]
    if not points:
        return ""
    most, rate = measured.ceilings.operations_per_s, measured.ceilings.bytes_per_s
    across = [most / rate, *(intensity for _, intensity, _ in points)]
    left, right = min(across) / 2, max(across) * 2
    low, high = min(rate * left, *(speed for *_, speed in points)) / 2, most * 2

    def place(intensity: float, speed: float) -> tuple[float, float]:
        x = math.log(intensity / left) / math.log(right / left)
        return 100 * x, 100 * math.log(speed / low) / math.log(high / low)

    corners = [place(left, rate * left), place(most / rate, most), place(right, most)]
    line = " ".join(f"{x:.2f},{100 - y:.2f}" for x, y in corners)
    dots = ""
    for name, intensity, speed in points:
        x, y = place(intensity, speed)
        title = html.escape(f"{name}: {intensity:.3g} operations a byte, {speed / 1e9:.3g} G operations a second")
        dots += f'<i style="left:{x:.2f}%;bottom:{y:.2f}%" title="{title}"></i>'
    return (
        '<p class="hint">Forward passes below their limit: each layer by its operations a byte '
        f"({left:.2g} to {right:.2g}) and operations a second ({low / 1e9:.2g} G to {high / 1e9:.2g} G), on scales of "
        'logarithms.</p><div class="roofline"><svg viewBox="0 0 100 100" preserveAspectRatio="none"><polyline '
        f'points="{line}" vector-effect="non-scaling-stroke"/></svg>{dots}</div>'
    )


def _recomputation(analysis: Analysis) -> str:
    whole = analysis.forward.work + analysis.backward.work
    rows = [["none", "0", size(analysis.saved_bytes), "", ""]]
    rows += [
        [
            each.how,
            str(len(each.parts)),
            size(each.peak_bytes),
            f"{1 - each.peak_bytes / max(1, analysis.saved_bytes):.0%}",
            f"{each.work / max(1, whole) - 1:.0%}",
        ]
        for each in analysis.recomputations
    ]
    return _table(["train.recompute", "parts", "kept", "spared", "more operations"], rows, texts=1)


def _traffic(analysis: Analysis) -> str:
    rows = [
        ["data", "2", size(analysis.parameter_bytes), number(analysis.parameters)],
        *([each.kind, str(each.degree), size(each.num_bytes), number(each.parameters)] for each in analysis.traffic),
    ]
    return _table(["split", "workers", "sent by one, a step", "parameters of one"], rows, texts=1)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], last: Sequence[str] = (), *, texts: int) -> str:
    """Return a table whose first `texts` columns are texts, and the others numbers."""

    def row(cells: Sequence[str], tag: str = "td") -> str:
        kinds = ["" if place < texts else ' class="number"' for place in range(len(cells))]
        return "".join(f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

    body = "".join(f"<tr>{row(cells)}</tr>" for cells in rows)
    foot = f'<tr class="all">{row(last)}</tr>' if last else ""
    head = f"<thead><tr>{row(header, 'th')}</tr></thead>"
    return f'<div class="scroll"><table>{head}<tbody>{body}{foot}</tbody></table></div>'
