"""The five busiest paths between a request and its answer, and the recorder of the calls on them, for `hops.py`."""

from __future__ import annotations

import contextlib
import http.client
import inspect
import itertools
import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from harness import benchmark

sys.path.insert(0, str(benchmark.REPOSITORY / "tests"))  # for `support`, which has replicas and servers as threads

_ROOMS = ("platform", "trainers", "search", "serving", "src/orchestray")
TIMEOUT_S = 300.0
"""Seconds that a path may take."""
_QUIET_S = 0.3
"""Seconds in which threads that wait for each other come to rest."""
_NUMBER = 3
"""The step, push or trial that is counted: what is made once is made by then."""
_NUM_WARM = 5
"""Requests before the one that is counted."""


class Call(NamedTuple):
    """One entry into a function, or one return into a generator or coroutine that had paused."""

    thread: str
    function: str
    file: str
    line: int
    depth: int
    """Number of our own functions that it was called from."""


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
    if not ready.wait(TIMEOUT_S):
        raise benchmark.BenchmarkError("the endpoint is not ready")
    connection = http.client.HTTPConnection("127.0.0.1", int(told["url"].rpartition(":")[2]), timeout=TIMEOUT_S)
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
    server.join(TIMEOUT_S)


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
