"""Machinery that every benchmark shares: turns, medians, and the files of a result.

A benchmark measures us and the peer in the same run, one after the other and in turns. Whatever else the machine does
meets both. Nothing here names hosts, users or absolute paths.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import datetime as dt
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import machine

FOLDER = Path(__file__).resolve().parents[1]
"""The folder of benchmarks, which is on the path of every process here."""
REPOSITORY = FOLDER.parent
RESULTS = FOLDER / "results"

STATUS_DONE, STATUS_BROKEN, STATUS_GOAL_MISSED = 0, 1, 3
_BUSY_LOAD_PER_CORE = 0.5


class BenchmarkError(Exception):
    """Failure of a measurement; the text says why."""


# -- numbers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """Raw numbers of one side, in the order they were taken."""

    name: str
    unit: str
    values: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def summary(self) -> dict[str, Any]:
        return {"name": self.name, "unit": self.unit, **spread(self.values), "values": [_short(v) for v in self.values]}


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the median, min, max and number of `values`."""
    if not values:
        raise BenchmarkError("nothing was measured")
    return {
        "median": _short(statistics.median(values)),
        "min": _short(min(values)),
        "max": _short(max(values)),
        "num": len(values),
    }


def ratios(ours: Sequence[float], peer: Sequence[float]) -> list[float]:
    """Return ours over the peer's, round by round where each has one number a round, else over the peer's median."""
    if len(ours) == len(peer):
        return [a / b for a, b in zip(ours, peer, strict=True)]
    return [a / statistics.median(peer) for a in ours]


def alternate(sides: Mapping[str, Callable[[], None]], rounds: int, say: Callable[[str], None]) -> None:
    """Call every side once a round; the order turns round by round, so that no side is always first."""
    names = list(sides)
    for number in range(rounds):
        shift = number % len(names)
        for name in [*names[shift:], *names[:shift]]:
            say(f"round {number + 1}/{rounds}: {name}")
            sides[name]()


# -- a report --------------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """Results of one benchmark."""

    name: str
    claim: str
    """One sentence: what is measured, against what."""
    settings: dict[str, Any] = field(default_factory=dict)
    measurements: list[dict[str, Any]] = field(default_factory=list)
    ratios: list[dict[str, Any]] = field(default_factory=list)
    goals: list[dict[str, Any]] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    """Raw records that are more than a list of numbers."""

    def add(self, name: str, unit: str, values: Sequence[float]) -> Measurement:
        measurement = Measurement(name, unit, list(values))
        self.measurements.append(measurement.summary())
        return measurement

    def compare(self, name: str, ours: Sequence[float], peer: Sequence[float]) -> float:
        """Add the ratio ours / peer, and return its median."""
        values = ratios(ours, peer)
        self.ratios.append({"name": name, **spread(values), "values": [_short(v) for v in values]})
        return statistics.median(values)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Add a table of texts, for what is measured once in many ways."""
        self.tables.append({"header": list(header), "rows": [list(row) for row in rows]})

    def goal(self, name: str, value: float, limit: float, unit: str = "") -> None:
        """Hold the median `value` against what was promised: at most `limit`."""
        met = value <= limit
        self.goals.append({"name": name, "value": _short(value), "limit": limit, "unit": unit, "met": met})

    @property
    def met(self) -> bool:
        return all(goal["met"] for goal in self.goals)


def run(
    name: str, claim: str, measure: Callable[[Report, Options], None], add_options: Callable[[Any], None] | None = None
) -> None:
    """Run a benchmark as its `main`: parse the options, measure, print, write the result, exit.

    The exit status is 0 when every goal is met, 3 when one is missed, 1 when it could not be measured.
    """
    parser = argparse.ArgumentParser(description=claim)
    parser.add_argument("--quick", action="store_true", help="a smoke run: few rounds, numbers that mean little")
    parser.add_argument("--rounds", type=int, default=None, help="how often each side is measured")
    parser.add_argument("--results-dir", type=Path, default=None, help="default: results/ here; with --quick nowhere")
    parser.add_argument("--workspace", type=Path, default=None, help="where runs go; default: a temporary place")
    if add_options is not None:
        add_options(parser)
    arguments = parser.parse_args()
    report = Report(name, claim)
    began = _now()
    load_before = os.getloadavg()[0]
    _compile_ours()
    try:
        with _workspace(arguments.workspace) as workspace:
            filesystem = machine.filesystem(workspace)
            measure(report, Options(arguments.quick, arguments.rounds, workspace, arguments))
    except (BenchmarkError, subprocess.SubprocessError, OSError) as error:
        print(f"{name}: could not be measured: {error}", file=sys.stderr)
        traceback.print_exc()
        sys.exit(STATUS_BROKEN)
    result = _document(report, began, arguments.quick, load_before, filesystem)
    text = render(result)
    print(text)
    directory = arguments.results_dir or (None if arguments.quick else RESULTS)
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        (directory / f"{name}.md").write_text(text, encoding="utf-8")
    sys.exit(STATUS_DONE if report.met else STATUS_GOAL_MISSED)


def _compile_ours() -> None:
    """Write the bytecode of our modules, as pip has done for those of the peers.

    Where PYTHONDONTWRITEBYTECODE is set, each process that imports from a source tree compiles it again, in 0.2 s.
    """
    import orchestray

    for folder, _, names in os.walk(Path(orchestray.__file__).parent, followlinks=True):
        for name in names:
            if name.endswith(".py"):
                compileall.compile_file(Path(folder, name), quiet=2)


@dataclass(frozen=True)
class Options:
    """Options that a benchmark was started with."""

    quick: bool
    wanted_rounds: int | None
    workspace: Path
    """An empty directory of this run, removed at the end."""
    arguments: argparse.Namespace

    def rounds(self, usual: int, quick: int = 1) -> int:
        return self.wanted_rounds or (quick if self.quick else usual)


def _document(report: Report, began: str, quick: bool, load_before: float, filesystem: str) -> dict[str, Any]:
    cores = machine.usable_cores()
    notes = list(report.notes)
    if load_before > _BUSY_LOAD_PER_CORE * cores:
        notes.append(f"The machine was not quiet: its load was {load_before:.1f} on {cores} core(s) before this began.")
    return {
        "benchmark": report.name,
        "claim": report.claim,
        "began": began,
        "ended": _now(),
        "quick": quick,
        "machine": {**machine.description(), "filesystem": filesystem, "load_before": round(load_before, 2)},
        "versions": machine.versions(),
        "settings": report.settings,
        "goals": report.goals,
        "ratios": report.ratios,
        "tables": report.tables,
        "measurements": report.measurements,
        "notes": notes,
        "details": report.details,
    }


def render(result: Mapping[str, Any]) -> str:
    """Return a result as Markdown that reads well on a terminal too."""
    lines = [f"# {result['benchmark']}", "", result["claim"], ""]
    if result["quick"]:
        lines += ["**A smoke run (`--quick`): the numbers mean little.**", ""]
    if result["goals"]:
        lines += table(
            ["goal", "median", "at most", ""],
            [
                [g["name"], _with_unit(g["value"], g["unit"]), _with_unit(g["limit"], g["unit"]), verdict(g["met"])]
                for g in result["goals"]
            ],
        )
    if result["ratios"]:
        lines += table(
            ["ours / peer", "median", "min", "max", "pairs"],
            [
                [r["name"], *(f"{r[key]:.3g}" for key in ("median", "min", "max")), str(r["num"])]
                for r in result["ratios"]
            ],
        )
    for shown in result["tables"]:
        lines += table(shown["header"], shown["rows"])
    lines += table(
        ["measured", "unit", "median", "min", "max", "times"],
        [
            [m["name"], m["unit"], *(f"{m[key]:.4g}" for key in ("median", "min", "max")), str(m["num"])]
            for m in result["measurements"]
        ],
    )
    lines += [f"- {note}" for note in result["notes"]]
    lines += [""] if result["notes"] else []
    facts = {"measured": f"{result['began']} to {result['ended']}", **result["machine"], **result["versions"]}
    facts.update({name: json.dumps(value) for name, value in result["settings"].items()})
    lines += table(["", ""], [[str(name), str(value)] for name, value in facts.items()])
    lines += ["## Every number", ""]
    for m in result["measurements"]:
        values = m["values"]
        shown = ", ".join(f"{value:.5g}" for value in values[:60])
        more = f" ... ({len(values)} in all, in the .json file)" if len(values) > 60 else ""
        lines.append(f"- {m['name']} ({m['unit']}): {shown}{more}")
    return "\n".join(lines) + "\n"


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    made = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    head = "| " + " | ".join(cell.ljust(width) for cell, width in zip(header, widths, strict=True)) + " |"
    return [head, "| " + " | ".join("-" * max(3, width) for width in widths) + " |", *made, ""]


def verdict(met: bool) -> str:
    """Return how a table shows a goal that is met, or is not."""
    return "met" if met else "MISSED"


def _with_unit(value: float, unit: str) -> str:
    return f"{value:.4g} {unit}".strip()


def _short(value: float) -> float:
    return float(f"{value:.6g}")


# -- small things ----------------------------------------------------------------------------------------------------


def _now() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


@contextlib.contextmanager
def _workspace(parent: Path | None) -> Iterator[Path]:
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="orchestray-benchmark-", dir=parent))
    try:
        yield directory.resolve()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def say(text: str) -> None:
    """Print progress to stderr."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)
