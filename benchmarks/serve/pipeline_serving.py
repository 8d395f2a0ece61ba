"""A model served in a pipeline of two processes against one process: requests a second, closed clients, no HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from harness import benchmark

_TASK = {"type": "python_source", "context": 64, "width": 256, "depth": 8, "heads": 8}
_MAX_BATCH_SIZE = 16
_NUM_CLIENTS = 48
_SECONDS, _QUICK_S = 8.0, 2.0
_ROUNDS = 5
_GOAL = 1.6
_PIPELINE, _SINGLE, _SINGLE_TWO_THREADS = "pipeline of 2", "one process", "one process, 2 threads"


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    report.settings = {
        "task": str(_TASK),
        "max_batch_size": _MAX_BATCH_SIZE,
        "clients": _NUM_CLIENTS,
        "seconds a round": _QUICK_S if options.quick else _SECONDS,
        "torch threads": "1 a process",
    }
    run = _written_run(options.workspace)
    asyncio.run(_measure(report, options, run))


def _written_run(workspace: Path) -> Path:
    """Write a run directory with the untrained model: only its speed matters here, not its answers."""
    import torch
    import yaml

    from orchestray.platform.run.model_files import save_model
    from orchestray.platform.task import TaskSource
    from orchestray.trainers.tasks import build

    path = workspace / "large"
    path.mkdir(parents=True)
    config = {
        "name": "large",
        "task": _TASK,
        "train": {"batch_size": 8, "steps": 1, "optimizer": {"type": "sgd", "lr": 0.1}},
    }
    (path / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    arguments = {name: value for name, value in _TASK.items() if name != "type"}
    source = TaskSource("python_source", arguments)
    torch.manual_seed(0)
    tensors = build(source).build_model().state_dict()
    save_model(path / "model", tensors, {"task": source.to_json(), "precision": "float32", "seed": 0})
    return path


async def _measure(report: benchmark.Report, options: benchmark.Options, run: Path) -> None:
    from orchestray.serving.batching import Batcher, Greedy
    from orchestray.serving.models.load import load_served_model
    from orchestray.serving.replicas.in_process import in_process
    from orchestray.serving.sharded.model_parallel import ModelParallel
    from orchestray.serving.sharded.partition import ServedNetwork

    seconds = _QUICK_S if options.quick else _SECONDS
    benchmark.say("starting the processes")
    # Both are there at once, and take turns: three processes on what may be two cores.
    shared: dict[str, Any] = {"max_batch_size": _MAX_BATCH_SIZE, "cpus_per_worker": 0.5}
    parallel = await ModelParallel.start(run, ServedNetwork(pipeline=2, microbatches=1), **shared)
    # In a process of its own, as the pipeline's stages are: the clients cost both sides the same.
    single = await ModelParallel.start(run, ServedNetwork(), **shared)
    sides: dict[str, Batcher[Any, Any]] = {}
    for name, served in ((_PIPELINE, parallel), (_SINGLE, single)):
        sides[name] = Batcher(policy=Greedy(), max_batch_size=_MAX_BATCH_SIZE)
        for _ in range(served.num_in_flight + 1):  # one more than is computed: none waits for its next batch
            sides[name].add_runner(served.run)
    two = load_served_model(run, max_batch_size=_MAX_BATCH_SIZE, num_threads=2)
    sides[_SINGLE_TWO_THREADS] = Batcher(policy=Greedy(), max_batch_size=_MAX_BATCH_SIZE)
    two_threads = in_process(two, sides[_SINGLE_TWO_THREADS])
    rates: dict[str, list[float]] = {name: [] for name in sides}
    try:
        await _agree([side.submit for side in sides.values()])
        rounds = options.rounds(_ROUNDS)
        for number in range(rounds):
            names = list(sides)
            for name in [*names[number % 3 :], *names[: number % 3]]:
                benchmark.say(f"round {number + 1}/{rounds}: {name}")
                rates[name].append(await _requests_per_s(sides[name], seconds))
    finally:
        await asyncio.gather(sides[_PIPELINE].close(), sides[_SINGLE].close(), two_threads.close())
        await asyncio.gather(parallel.close(), single.close())
    for name, values in rates.items():
        report.add(name, "requests/s", values)
    ratio = report.compare("pipeline of 2 / one process, requests/s", rates[_PIPELINE], rates[_SINGLE])
    report.compare("pipeline of 2 / one process with 2 threads", rates[_PIPELINE], rates[_SINGLE_TWO_THREADS])
    report.goal("one process / pipeline of 2, requests/s", 1 / ratio, 1 / _GOAL)
    held = [worker["bytes"] for worker in parallel.held]
    report.notes.append(
        f"The stages hold {held[0] / 1e6:.1f} and {held[1] / 1e6:.1f} MB of the model's "
        f"{single.held[0]['bytes'] / 1e6:.1f} MB."
    )


async def _agree(submits: list[Callable[[Any], Awaitable[Any]]]) -> None:
    """Check that all sides give the same answer."""
    sample = {"inputs": np.arange(_TASK["context"], dtype=np.int64)}  # type: ignore[call-overload]
    first, *others = [await submit(sample) for submit in submits]
    for other in others:
        np.testing.assert_allclose(first["outputs"], other["outputs"], rtol=1e-4, atol=1e-5)


async def _requests_per_s(batcher: Any, seconds: float) -> float:
    """Return the requests a second of clients that ask again as soon as they are answered."""
    rng = np.random.default_rng(0)
    samples = [{"inputs": rng.integers(0, 256, _TASK["context"])} for _ in range(_NUM_CLIENTS)]  # type: ignore[arg-type]
    end_s = time.perf_counter() + seconds
    answered = 0

    async def client(sample: Any) -> None:
        nonlocal answered
        while time.perf_counter() < end_s:
            await batcher.submit(sample)
            answered += time.perf_counter() < end_s

    await asyncio.gather(*(client(sample) for sample in samples))
    return answered / seconds


if __name__ == "__main__":
    benchmark.run(
        "pipeline_serving",
        "A model served in a pipeline of two processes against one process: requests/s of 48 closed clients.",
        measure,
    )
