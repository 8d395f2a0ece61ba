"""Benchmarks of another checkout and of this one, in turns: `python benchmarks before_after CHECKOUT NAME...`.

The other checkout has a `.venv` of its own. What both measure of the peers, which do not change, says how far two runs
of the same differ on this machine.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import benchmark
from harness.benchmark import Options, Report

_TIMEOUT_S = 3600.0


def main() -> None:
    benchmark.run("before_after", "Benchmarks of two checkouts, in turns.", measure, add_options)


def add_options(parser: Any) -> None:
    parser.add_argument("checkout", type=Path, help="the other checkout, with a .venv")
    parser.add_argument("--rounds-each", type=int, default=None, help="rounds of each benchmark; default: its own")
    parser.add_argument("names", nargs="+", metavar="NAME", help="a benchmark, or NAME:PART for a part of one")


def measure(report: Report, options: Options) -> None:
    checkout: Path = options.arguments.checkout.resolve()
    before = [checkout / ".venv" / "bin" / "python", "-P"]
    commit = subprocess.run(
        ["git", "-C", checkout, "log", "-1", "--format=%h %cs"], capture_output=True, text=True, check=True
    ).stdout.strip()
    report.settings["before"] = commit
    ours: list[float] = []
    peers: list[float] = []
    for name in options.arguments.names:
        found: dict[str, list[dict[str, Any]]] = {"before": [], "after": []}
        sides = {
            "before": lambda name=name, found=found: found["before"].append(result_of(checkout, before, name, options)),
            "after": lambda name=name, found=found: found["after"].append(
                result_of(benchmark.REPOSITORY, [sys.executable, "-P"], name, options)
            ),
        }
        try:
            benchmark.alternate(sides, options.rounds(2), lambda text, name=name: benchmark.say(f"{name}: {text}"))
        except benchmark.BenchmarkError as error:  # what was measured before is kept
            benchmark.say(str(error))
            report.notes.append(f"{name} could not be measured.")
            continue
        rows = []
        for what, unit in {m["name"]: m["unit"] for result in found["after"] for m in result["measurements"]}.items():
            old, new = (medians(found[side], what) for side in ("before", "after"))
            if old and new and statistics.median(old):
                ratio = statistics.median(new) / statistics.median(old)
                (ours if "ours" in what or "orchestray" in what else peers).append(ratio)
                rows.append([what, unit, *(f"{statistics.median(each):.4g}" for each in (old, new)), f"{ratio:.3f}"])
        report.table([name, "unit", "before", "after", "after / before"], rows)
    report.add("ours: after / before", "", ours)
    if peers:
        report.add("peers and others: after / before", "", peers)
    report.notes.append(
        "Each number is the median of what the rounds of a benchmark gave; rounds of both checkouts are in turns. Rows"
        " without `ours` are of peers, which are the same code on both sides."
    )


def medians(results: Sequence[Mapping[str, Any]], what: str) -> list[float]:
    """Return the medians of a measurement in some results."""
    return [m["median"] for result in results for m in result["measurements"] if m["name"] == what]


def result_of(folder: Path, python: Sequence[Any], name: str, options: Options) -> dict[str, Any]:
    """Run a benchmark of a checkout, and return its result."""
    name, _, part = name.partition(":")
    results = options.workspace / "results"
    file = next(iter(sorted((folder / "benchmarks").rglob(f"{name}.py"))), None)
    if file is None:
        raise benchmark.BenchmarkError(f"{folder.name} has no benchmark {name!r}")
    command = [*python, file, "--results-dir", results, *(["--quick"] if options.quick else [])]
    command += ["--only", part] if part else []
    command += ["--rounds", options.arguments.rounds_each] if options.arguments.rounds_each else []
    environment = {**os.environ, "PYTHONPATH": str(folder / "benchmarks")}
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode not in (benchmark.STATUS_DONE, benchmark.STATUS_GOAL_MISSED):
        raise benchmark.BenchmarkError(f"{name} of {folder.name} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    document: dict[str, Any] = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
    return document


if __name__ == "__main__":
    main()
