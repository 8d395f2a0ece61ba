"""Endpoints of ours and of the peers: started on a port of their own, loaded, and ended with all their processes."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import benchmark, commands, environments
from serve.serving_model import EXAMPLE

A_S, C_S, MAX_BATCH_SIZE = 0.020, 0.0005, 32
PEER_PACKAGES = ("bentoml==1.4.39", "litserve==0.2.19")
_READY_S, _STOP_S = 120.0, 30.0
_TIMEOUT_S = 60.0
_SETTLE_S = 1.0
"""From the first answer until a server has done what it does once."""


@dataclass(frozen=True)
class Endpoint:
    """An endpoint that answers."""

    name: str
    port: int
    path: str
    body: Any
    running: commands.Running

    def target(self) -> Any:
        from orchestray.loadtest import Target

        return Target("127.0.0.1", self.port, self.path, bodies=(json.dumps(self.body).encode(),))

    def load(self, load: Any, seconds: float, *, warm_up_s: float = 2.0, on_progress: Any = None) -> Any:
        """Put a load on it from one process, and return what was measured."""
        from orchestray.loadtest import Plan, measure

        plan = Plan(self.target(), load, duration_s=seconds, warm_up_s=warm_up_s, timeout_s=_TIMEOUT_S)
        measured = measure(plan, num_processes=1, on_progress=on_progress)
        self.running.check_alive()
        told = measured.summary()
        benchmark.say(
            f"  {self.name}, {told['load']}: {told['answered_per_s']:g}/s, mean {told['latency_ms']['mean']} ms, "
            f"p50 {told['latency_ms']['p50']}, p99 {told['latency_ms']['p99']}, {told['num_failed']} failed, "
            f"load generator {told['client']['cpu_percent'][0]:.0f} % of a core"
        )
        return measured

    def processes(self) -> list[Any]:
        """Return its process, and all its descendants."""
        import psutil

        root = psutil.Process(self.running.process.pid)
        return [root, *root.children(recursive=True)]

    def cpu_share(self, seconds: float) -> float:
        """Return what its processes take of a core while there are no requests."""
        time.sleep(_SETTLE_S)
        processes = self.processes()
        before_s = cpu_s(processes)
        time.sleep(seconds)
        return (cpu_s(processes) - before_s) / seconds


def cpu_s(processes: Sequence[Any]) -> float:
    """Return the seconds of CPU that processes have used so far; those that have ended count as none."""
    import psutil

    total_s = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total_s += times.user + times.system
    return total_s


Side = Callable[[], "contextlib.AbstractContextManager[Endpoint]"]


def ours(
    options: benchmark.Options,
    a_s: float = A_S,
    c_s: float = C_S,
    *,
    loops: int = 0,
    flags: Sequence[str] = (),
    **settings: Any,
) -> Side:
    """Run `orchestray serve` of a run with the model; `settings` are keys of its config, `__` for a dot."""
    run = _write_run(options.workspace, a_s, c_s, loops)
    keys = {"batching.max_batch_size": MAX_BATCH_SIZE, **{key.replace("__", "."): v for key, v in settings.items()}}
    made = 0

    @contextlib.contextmanager
    def start() -> Iterator[Endpoint]:
        nonlocal made
        made += 1
        port = free_port()
        runs_dir = options.workspace / f"endpoint-{port}-{made}"
        command = [commands.script("orchestray"), "serve", str(run), f"http.port={port}", "--runs-dir", str(runs_dir)]
        command += flags
        command += [f"{key}={json.dumps(value)}" for key, value in keys.items()]
        with _started("orchestray", command, port, "/predict", {"inputs": EXAMPLE}) as endpoint:
            yield endpoint

    return start


def _write_run(workspace: Path, a_s: float, c_s: float, loops: int) -> Path:
    """Write a run directory as training leaves it: there is nothing to learn."""
    from orchestray.platform.run.model_files import save_model
    from orchestray.platform.task import TaskSource
    from orchestray.trainers.tasks import build

    arguments = {"a_s": a_s, "c_s": c_s, "loops": loops}
    path = workspace / "runs" / f"timed-{a_s * 1e6:.0f}-{c_s * 1e6:.0f}-{loops}"
    if path.exists():
        return path
    path.mkdir(parents=True)
    file = benchmark.FOLDER / "serve" / "serving_model.py"
    kind = f"{file}:Timing"
    config = {
        "name": path.name,
        "task": {"type": kind, **arguments},
        "train": {"batch_size": 1, "steps": 1, "optimizer": {"type": "sgd", "lr": 0.1}},
    }
    commands.write_json(path / "config.yaml", config)
    source = TaskSource(kind, arguments, str(file), file.read_text(encoding="utf-8"))
    told = {"task": source.to_json(), "precision": "float32", "seed": 0}
    save_model(path / "model", build(source).build_model().state_dict(), told)
    return path


def ray(
    options: benchmark.Options,
    kind: str,
    a_s: float = A_S,
    c_s: float = C_S,
    *,
    environment: Mapping[str, str] | None = None,
    **settings: Any,
) -> Side:
    """Run Ray Serve, as `harness/peers/serve_ray.py` has it."""

    @contextlib.contextmanager
    def start() -> Iterator[Endpoint]:
        port = free_port()
        spec = {"kind": kind, "a_s": a_s, "c_s": c_s, "port": port, "max_batch_size": MAX_BATCH_SIZE, **settings}
        told = commands.write_json(options.workspace / f"ray-{port}.json", spec)
        command = commands.python(commands.peer("serve_ray"), str(told))
        with _started(f"Ray Serve, {kind}", command, port, "/", {"inputs": EXAMPLE}, environment) as endpoint:
            yield endpoint

    return start


def bentoml(
    options: benchmark.Options, python: Path, a_s: float = A_S, c_s: float = C_S, *, batched: bool = True
) -> Side:
    """Run BentoML with one worker and adaptive batching, or without batching."""

    @contextlib.contextmanager
    def start() -> Iterator[Endpoint]:
        port = free_port()
        spec = {"a_s": a_s, "c_s": c_s, "max_batch_size": MAX_BATCH_SIZE, "batched": batched}
        environment = {
            "BENTOML_HOME": str(options.workspace / "bentoml"),
            "BENTOML_DO_NOT_TRACK": "true",
            "SERVE_SPEC": json.dumps(spec),
        }
        command = [str(python), "-m", "bentoml", "serve", "serve_bentoml:Peer", "--port", str(port)]
        command += ["--working-dir", str(benchmark.FOLDER / "harness" / "peers"), "--host", "127.0.0.1"]
        body = {"inputs": [EXAMPLE] if batched else EXAMPLE}
        with _started("BentoML", command, port, "/predict", body, environment) as endpoint:
            yield endpoint

    return start


def litserve(
    options: benchmark.Options,
    python: Path,
    a_s: float = A_S,
    c_s: float = C_S,
    *,
    batch_timeout_s: float = 0.0,
    max_batch_size: int = MAX_BATCH_SIZE,
) -> Side:
    """Run LitServe with one worker and one API server."""

    @contextlib.contextmanager
    def start() -> Iterator[Endpoint]:
        port = free_port()
        spec = {"a_s": a_s, "c_s": c_s, "port": port, "max_batch_size": max_batch_size, "timeout_s": batch_timeout_s}
        told = commands.write_json(options.workspace / f"litserve-{port}.json", spec)
        command = [str(python), commands.peer("serve_litserve"), str(told)]
        name = f"LitServe, timeout {batch_timeout_s * 1e3:g} ms" if max_batch_size > 1 else "LitServe"
        with _started(name, command, port, "/predict", {"inputs": EXAMPLE}) as endpoint:
            yield endpoint

    return start


@contextlib.contextmanager
def _started(
    name: str, command: Sequence[str], port: int, path: str, body: Any, environment: Mapping[str, str] | None = None
) -> Iterator[Endpoint]:
    """Start an endpoint, wait until it answers rightly, and end it with all its processes."""
    with commands.running(command, environment) as under_way:
        endpoint = Endpoint(name, port, path, body, under_way)
        under_way.wait_until(lambda: _answers(endpoint), _READY_S, f"an answer of {name}")
        yield endpoint
        # Gently first: some leave processes behind that are not descendants of theirs any more.
        under_way.interrupt()
        with contextlib.suppress(subprocess.TimeoutExpired):
            under_way.process.wait(_STOP_S)


def _answers(endpoint: Endpoint) -> bool:
    """Return True if it answers, and with the model's answer.

    Raises:
        BenchmarkError: it answers something else.
    """
    from orchestray.loadtest import EndpointError

    try:
        return ask(endpoint)
    except EndpointError:
        return False


def ask(endpoint: Endpoint) -> bool:
    """Send one request; return True if it is answered, and not by a front that has nothing behind it yet.

    Raises:
        BenchmarkError: the answer is not the model's.
        EndpointError: there is none.
    """
    from orchestray.loadtest.exchange import exchange

    answer = exchange(endpoint.target(), timeout_s=_TIMEOUT_S)
    if answer.status in {404, 502, 503}:
        return False
    found = _numbers(answer.json())
    if not answer.ok or found != [2 * value for value in EXAMPLE]:
        raise benchmark.BenchmarkError(f"{endpoint.name} answered {answer.status}: {answer.text()}")
    return True


def _numbers(value: Any) -> list[float]:
    """Return all numbers in some JSON, in order."""
    if isinstance(value, Mapping):
        return _numbers(value.get("outputs"))
    if isinstance(value, list):
        return [number for part in value for number in _numbers(part)]
    return [value] if isinstance(value, int | float) else []


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


# -- the peers' own packages -------------------------------------------------------------------------------------------

add_options = environments.add_options


def peers_python(options: benchmark.Options) -> Path:
    """Make an interpreter that has the peers' packages."""
    return environments.peers_python(options, PEER_PACKAGES)


def peer_versions(python: Path) -> dict[str, str]:
    """Return the versions of the peers' packages."""
    return environments.versions(python, ("bentoml", "litserve"))


def mean_ms(measured: Any) -> float:
    """Return the mean latency; a benchmark with failed requests has not measured it."""
    if measured.tally.latency.num == 0:
        raise benchmark.BenchmarkError(f"nothing was answered: {measured.summary()['errors']}")
    return float(measured.tally.latency.mean_s * 1e3)


def note_limits(report: benchmark.Report, measured: Mapping[str, Sequence[Any]]) -> None:
    """Note what the load generator took, and which requests failed."""
    for name, runs in measured.items():
        busiest = max(max(run.cpu_shares) for run in runs)
        limited = sum(run.limited for run in runs)
        failed = sum(run.num_failed for run in runs)
        if limited or failed:
            report.notes.append(
                f"{name}: {failed} requests failed; in {limited} of {len(runs)} measurements the load generator was a "
                f"limit (at most {busiest:.0%} of a core)."
            )
