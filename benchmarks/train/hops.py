"""Count what stands between a request and its answer: our own calls, functions and files, on the five busiest paths.

`python benchmarks hops --path step` prints one path, one line a function, in the order of their first calls.
`python benchmarks hops --docs docs` writes the pages of a batch's and a push's path.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import inspect
import itertools
import json
import os
import select
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from harness import benchmark, commands

sys.path.insert(0, str(benchmark.REPOSITORY / "tests"))  # for `support`, which has replicas and servers as threads

_ROOMS = ("platform", "trainers", "search", "serving", "src/orchestray")
_TIMEOUT_S = 300.0
_QUIET_S = 0.3
"""Seconds in which threads that wait for each other come to rest."""
_NUMBER = 3
"""The step, push or trial that is counted: what is made once is made by then."""
_NUM_WARM = 5
"""Requests before the one that is counted."""
_BEFORE_COMMIT = "aa0e7e8"


class Call(NamedTuple):
    """One entry into a function, or one return into a generator or coroutine that had paused."""

    thread: str
    function: str
    file: str
    line: int
    depth: int
    """Number of our own functions that it was called from."""


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


class Tracer:
    """Recorder of calls of our own code, in the threads whose profile function it is, while it is on."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.modules: list[str] = []
        self.is_on = False
        self.until: Callable[[], bool] = lambda: False
        """Looked at before each call: once it holds, no more are noted."""
        self._files: dict[str, str | None] = {}

    @contextlib.contextmanager
    def noting(self, quiet_s: float = 0.0) -> Iterator[None]:
        """Note the calls of this thread within the block, and those of others until they are at rest."""
        time.sleep(quiet_s)
        sys.setprofile(self.profile)
        self.is_on = True
        try:
            yield
        finally:
            sys.setprofile(None)
            time.sleep(quiet_s)
            self.is_on = False

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        """Note a call: a profile function, see `sys.setprofile`."""
        if not self.is_on or event != "call":
            return
        code = frame.f_code
        file = self._own_file(code)
        if file is None:
            return
        if self.until():
            self.is_on = False
        elif code.co_name == "<module>":
            self.modules.append(file)
        elif code.co_flags & inspect.CO_OPTIMIZED:  # else it is the body of a class
            depth, above = 0, frame.f_back
            while above is not None:
                depth += self._own_file(above.f_code) is not None
                above = above.f_back
            thread = threading.current_thread().name
            self.calls.append(Call(thread, code.co_qualname, file, code.co_firstlineno, depth))

    def _own_file(self, code: CodeType) -> str | None:
        """Return the path of our own code inside the repository; None: it is somebody else's."""
        name = code.co_filename
        if name not in self._files:
            path = os.path.realpath(name)  # the folders of the package are links
            own = any(path.startswith(f"{benchmark.REPOSITORY / room}{os.sep}") for room in _ROOMS)
            self._files[name] = os.path.relpath(path, benchmark.REPOSITORY) if own else None
        return self._files[name]


# -- the paths ---------------------------------------------------------------------------------------------------------


def trace_step(tracer: Tracer, _: Path) -> None:
    """Trace rank 0 of two replicas that are threads, in one step of `configs/train/digits.yaml`."""
    from orchestray.platform.run.recorder import Recorder
    from orchestray.trainers.loop.loop import Loop
    from orchestray.trainers.loop.replica import Replica
    from support.threads import run_replicas
    from support.training import digits, settings_for, stream_of

    task = digits(hidden=[128, 128])
    sgd = {"type": "sgd", "lr": 0.1, "momentum": 0.9}
    settings = settings_for(2, steps=_NUMBER + 1, optimizer=sgd, batch_size=64, precision="float32")
    replicas = [Replica(task, settings, stream_of(task, settings), recorder=Recorder()) for _ in range(2)]

    def train(collective: Any) -> None:
        replica: Any = replicas[collective.rank]
        replica.connect(collective)
        loop: Any = Loop(replica, time.time())
        step = loop._until_agreed

        def traced(*given: Any) -> Any:
            if replica.position.step != _NUMBER - 1:
                return step(*given)
            with tracer.noting():
                return step(*given)

        if collective.rank == 0:
            loop._until_agreed = traced
        loop.run()

    run_replicas(2, train)


def trace_push(tracer: Tracer, folder: Path) -> None:
    """Trace one push of the only worker to the only shard: the threads of worker, channel and server."""
    threading.setprofile(tracer.profile)
    from orchestray.trainers.ps.worker import pushing
    from support.central_run import central_settings, train_central
    from support.training import digits

    each: Any = pushing.PushesEach
    push, numbers = each.push, itertools.count(1)

    def traced(pusher: Any, computed: Any) -> Any:
        if next(numbers) != _NUMBER:
            return push(pusher, computed)
        threading.current_thread().name = "worker 0"
        with tracer.noting(_QUIET_S):
            return push(pusher, computed)

    each.push = traced
    chosen = {"optimizer": {"type": "sgd", "lr": 0.1}, "batch_size": 64, "precision": "float32"}
    settings = central_settings(1, {"consistency": "asynchronous"}, steps=_NUMBER + 2, **chosen)
    train_central(lambda: digits(hidden=[128, 128]), settings, folder)


def trace_predict(tracer: Tracer, folder: Path) -> None:
    """Trace a POST /predict over a socket that is open, from its arrival until the client can read the answer."""
    import asyncio

    threading.setprofile(tracer.profile)
    from orchestray.serving.api import serve
    from support.served import written_run

    model = {"name": "digits", "run": str(written_run(folder / "runs", "digits"))}
    config = {"name": "endpoint", "http": {"port": 0}, "models": [model], "replicas": 1}
    ready = threading.Event()
    told: dict[str, Any] = {}

    def say(url: str) -> None:
        told.update(url=url, loop=asyncio.get_running_loop(), tasks=asyncio.all_tasks())
        ready.set()

    def work() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            serve(config, runs_dir=folder / "runs", local=True, on_ready=say)

    server = threading.Thread(target=work, name="server", daemon=True)
    server.start()
    if not ready.wait(_TIMEOUT_S):
        raise benchmark.BenchmarkError("the endpoint is not ready")
    connection = http.client.HTTPConnection("127.0.0.1", int(told["url"].rpartition(":")[2]), timeout=_TIMEOUT_S)
    tracer.until = lambda: bool(select.select([connection.sock], [], [], 0)[0])
    for number in range(_NUM_WARM + 1):
        is_last = number == _NUM_WARM
        time.sleep(_QUIET_S if is_last else 0.0)
        tracer.is_on = is_last
        connection.request("POST", "/predict", json.dumps({"inputs": [0.5] * 64}), {"content-type": "application/json"})
        time.sleep(_QUIET_S if is_last else 0.0)  # the answer is left unread
        tracer.is_on = False
        answer = connection.getresponse()
        if not answer.read() or answer.status != 200:
            raise benchmark.BenchmarkError(f"the endpoint answers {answer.status}")
    connection.close()
    main = next(task for task in told["tasks"] if task.get_coro().__name__ == "run")
    told["loop"].call_soon_threadsafe(main.cancel)
    server.join(_TIMEOUT_S)


def trace_trial(tracer: Tracer, folder: Path) -> None:
    """Trace a trial of random search, from the question for it to its end; its process is an object of this one."""
    threading.setprofile(tracer.profile)
    from orchestray.search.registry.methods import make_method
    from orchestray.search.spaces.dimensions import Uniform
    from support.search_loop import Loop

    space = {"train.optimizer.lr": Uniform(0.01, 0.1)}
    method = make_method("random", space=space, trials=_NUMBER + 2, steps_per_trial=1, seed=0, architecture=None)
    loop = Loop(method, folder)
    for _ in range(_NUMBER - 1):
        loop.step()
    with tracer.noting(_QUIET_S):
        loop.step()
    if len(loop.begun) != _NUMBER or loop.orders:
        raise benchmark.BenchmarkError("a trial takes more than one order")
    loop.close()


def trace_cold_start(tracer: Tracer, folder: Path) -> None:
    """Trace the driver of `orchestray train`, from its first import to the first line of `metrics.jsonl`."""
    metrics = folder / "hops" / "metrics.jsonl"

    def has_line() -> bool:
        with contextlib.suppress(OSError):
            return metrics.stat().st_size > 0
        return False

    config = benchmark.REPOSITORY / "configs" / "train" / "digits.yaml"
    budget = ["train.epochs=null", "train.steps=1"]
    sys.argv = ["orchestray", "train", str(config), *budget, "--name", "hops", "--runs-dir", str(folder)]
    threading.setprofile(tracer.profile)
    sys.setprofile(tracer.profile)
    tracer.until, tracer.is_on = has_line, True
    from orchestray.cli.app import main

    try:
        main()
    except SystemExit as end:
        if end.code:
            raise benchmark.BenchmarkError(f"orchestray train ended with status {end.code}") from end
    finally:
        sys.setprofile(None)
        tracer.is_on = False


@dataclass(frozen=True)
class Traced:
    """A path that is counted."""

    trace: Callable[[Tracer, Path], None]
    rounds: int
    what: str
    under: str = ""
    """Only files under this folder count."""


PATHS: Mapping[str, Traced] = {
    "step": Traced(trace_step, 2, "a step of two replicas (data parallel, all-reduce, SGD with momentum), on rank 0"),
    "push": Traced(trace_push, 5, "a push to an asynchronous parameter server: one worker, one shard, SGD"),
    "predict": Traced(trace_predict, 5, "POST /predict of a model in the endpoint's process, nothing else under way"),
    "trial": Traced(trace_trial, 2, "a trial of random search: what search/ does around the training", "search/"),
    "cold_start": Traced(trace_cold_start, 5, "the driver of `orchestray train` until the first line of metrics"),
}

# -- counting ----------------------------------------------------------------------------------------------------------


def traced_once(name: str, folder: Path) -> tuple[list[Call], Figures]:
    """Trace a path in a process of its own; returns its calls in order, and what they come to."""
    folder.mkdir(parents=True)
    commands.run_command(commands.python(__file__, "--trace", name, str(folder)), _TIMEOUT_S)
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
            "`python benchmarks hops --docs docs` writes this page. Reasons: [architecture.md](architecture.md).",
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
