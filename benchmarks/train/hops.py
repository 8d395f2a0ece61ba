"""Count what stands between a request and its answer: our own calls, functions and files, on the five busiest paths.

`python benchmarks hops --path step` prints one path, one line a function, in the order of their first calls.
`python benchmarks hops --docs docs/explanation` writes the pages of four of them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from harness import benchmark, commands
from train.hop_paths import PATHS, TIMEOUT_S, Call, Tracer

_BEFORE_COMMIT = "aa0e7e8"


@dataclass(frozen=True)
class Figures:
    """Numbers of one path."""

    calls: int
    """Entries into functions; a generator or coroutine that goes on counts again."""
    functions: int
    """Distinct ones, by file and qualified name."""
    files: int
    moves: int
    """Neighbouring calls of one thread in different files."""
    modules: int
    """Own modules that are imported on the way."""


_NAMES = tuple(one.name for one in fields(Figures))
Range = tuple[Figures, Figures]
"""The least and the most of several runs."""

_GOALS: Mapping[str, Mapping[str, int]] = {
    "step": {"functions": 60, "files": 15},
    "push": {"functions": 110, "files": 16},
    "predict": {"calls": 120, "files": 16},
    "trial": {"calls": 120, "files": 12},
}
_BEFORE: Mapping[str, Range] = {
    "step": (Figures(151, 98, 23, 80, 0), Figures(151, 98, 23, 80, 0)),
    "push": (Figures(395, 218, 30, 146, 0), Figures(395, 218, 30, 146, 0)),
    "predict": (Figures(296, 199, 43, 210, 0), Figures(306, 200, 43, 213, 0)),
    "trial": (Figures(243, 136, 16, 102, 0), Figures(243, 136, 16, 102, 0)),
    "cold_start": (Figures(1035, 308, 49, 384, 87), Figures(1329, 308, 49, 416, 87)),
}
"""Counted by this script on `_BEFORE_COMMIT`, with the names that modules had there."""


def traced_once(name: str, folder: Path) -> tuple[list[Call], Figures]:
    """Trace a path in a process of its own; returns its calls in order, and what they come to."""
    folder.mkdir(parents=True)
    commands.run_command(commands.python(__file__, "--trace", name, str(folder)), TIMEOUT_S)
    told = json.loads((folder / "calls.json").read_text(encoding="utf-8"))
    under = PATHS[name].under
    calls = [call for call in (Call(*each) for each in told["calls"]) if call.file.startswith(under)]
    if not calls:
        raise benchmark.BenchmarkError(f"nothing of {benchmark.REPOSITORY.name} was called: is another copy installed?")
    return calls, counted(calls, [file for file in told["modules"] if file.startswith(under)])


def counted(calls: Sequence[Call], modules: Sequence[str]) -> Figures:
    """Count what the calls of a path come to."""
    last: dict[str, str] = {}
    moves = 0
    for call in calls:
        moves += last.get(call.thread, call.file) != call.file
        last[call.thread] = call.file
    functions = {(call.file, call.function) for call in calls}
    return Figures(len(calls), len(functions), len({call.file for call in calls}), moves, len(modules))


def write_trace(name: str, folder: Path) -> None:
    """Trace a path in this process, and write down what was called."""
    tracer = Tracer()
    with tempfile.TemporaryDirectory(dir=folder) as inner:
        PATHS[name].trace(tracer, Path(inner))
    commands.write_json(folder / "calls.json", {"calls": tracer.calls, "modules": tracer.modules})


def show(name: str) -> None:
    """Print a path: a line for each function, in the order of first calls, with its number of calls and its thread."""
    with tempfile.TemporaryDirectory(prefix="orchestray-hops-") as folder:
        calls, figures = traced_once(name, Path(folder) / name)
    times = Counter((call.file, call.function) for call in calls)
    first = {(call.file, call.function): call for call in reversed(calls)}
    print(f"{name}: {PATHS[name].what}")
    for key in dict.fromkeys((call.file, call.function) for call in calls):
        call = first[key]
        print(f"{times[key]:5} x  {call.file}:{call.line}  {call.function}  [{call.thread}]")
    print(", ".join(f"{value} {what}" for what, value in zip(_NAMES, astuple(figures), strict=True)))


PAGES: Mapping[str, tuple[str, str]] = {
    "step": ("path-of-a-batch.md", "The path of a batch"),
    "push": ("path-of-a-push.md", "The path of a push"),
    "trial": ("path-of-a-trial.md", "The path of a trial"),
    "predict": ("path-of-a-request.md", "The path of a request"),
}
_DETAILS = ("<lambda>", "<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "__init__", "__enter__", "__exit__")
"""Functions that a page leaves out."""
_FILE_AT = 64
"""Column of the files on a page."""


def page(name: str) -> str:
    """Return a path as a page: each function at its first call, under the one that calls it, and its file."""
    with tempfile.TemporaryDirectory(prefix="orchestray-hops-") as folder:
        calls, figures = traced_once(name, Path(folder) / name)
    lines: list[str] = []
    seen: set[tuple[str, str]] = set()
    for thread in dict.fromkeys(call.thread for call in calls):
        own = [call for call in calls if call.thread == thread]
        least = min(call.depth for call in own)
        lines += ["", f"-- thread {thread}"] if len({call.thread for call in calls}) > 1 else []
        for call in own:
            key = call.file, call.function
            if key in seen or call.function.endswith(_DETAILS):
                continue
            seen.add(key)
            place = f"{'  ' * (call.depth - least)}{call.function.replace('.<locals>', '')}"
            lines.append(f"{place:<{_FILE_AT}} {call.file}")
    _, title = PAGES[name]
    return "\n".join(
        [
            f"# {title}",
            "",
            f"{PATHS[name].what[0].upper()}{PATHS[name].what[1:]}:",
            f"{figures.functions} functions of ours in {figures.files} files. Each stands at its first call, under the",
            "one that calls it; constructors and comprehensions are left out.",
            "`python benchmarks hops --docs docs/explanation` writes this page.",
            "Reasons: [architecture.md](architecture.md).",
            "",
            "```text",
            *lines[lines[:1] == [""] :],
            "```",
            "",
        ]
    )


def write_pages(folder: Path) -> None:
    """Write the pages of the documentation that show a path."""
    for name, (file, _) in PAGES.items():
        (folder / file).write_text(page(name), encoding="utf-8")


def shown(least: int, most: int) -> str:
    """Return a number, or where runs differ the least and the most."""
    return str(least) if least == most else f"{least} to {most}"


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    """Count every path, and hold it against the goals of the design."""
    rows, rounds = [], {}
    for name, path in PATHS.items():
        rounds[name] = options.rounds(path.rounds)
        found: list[Figures] = []
        for number in range(rounds[name]):
            benchmark.say(f"{name}, {number + 1} of {rounds[name]}")
            found.append(traced_once(name, options.workspace / f"{name}-{number}")[1])
        for figure in _NAMES:
            values = [int(getattr(one, figure)) for one in found]
            report.add(f"{name}: {figure}", figure, [float(value) for value in values])
            before = _BEFORE.get(name)
            old = shown(*(int(getattr(one, figure)) for one in before)) if before is not None else "-"
            goal = _GOALS.get(name, {}).get(figure)
            rows.append([name, figure, old, shown(min(values), max(values)), "" if goal is None else f"{goal}"])
            if goal is not None:
                report.goal(f"{name}: {figure}", max(values), goal)
    report.table(["path", "figure", f"before ({_BEFORE_COMMIT})", "now", "goal"], rows)
    report.settings = {"rounds": rounds, **{name: path.what for name, path in PATHS.items()}}
    report.notes += [
        "Only calls of our own files count: those under platform/, trainers/, search/, serving/ and src/orchestray/.",
        "Functions are counted by file and name. A generator or coroutine that goes on is called again.",
        "A move is two calls of one thread, one after the other, in different files.",
        "Where runs differ by what the clock says, the least and the most are shown, and the goal is for the most.",
        "A trial is counted in search/ alone, with its records in memory; a predicted sample is of a real model.",
        f"Before is commit {_BEFORE_COMMIT}, by Python 3.11 as well: later ones make no call of a comprehension.",
        "The goals are those of the design for later work: each is met or missed as the code is now.",
    ]


def add_options(parser: Any) -> None:
    """Add the options beside those that every benchmark has."""
    parser.add_argument("--path", choices=PATHS, help="print one path, function by function, and count nothing else")
    parser.add_argument("--docs", type=Path, metavar="FOLDER", help="write the pages that show a path, nothing else")
    parser.add_argument("--trace", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)


if __name__ == "__main__":
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_options(options)
    asked, _ = options.parse_known_args()
    if asked.trace is not None:
        write_trace(asked.trace[0], Path(asked.trace[1]))
    elif asked.path is not None:
        show(asked.path)
    elif asked.docs is not None:
        write_pages(asked.docs)
    else:
        claim = "How many of our own calls, functions and files there are in a step, push, request, trial and start."
        benchmark.run("hops", claim, measure, add_options)
