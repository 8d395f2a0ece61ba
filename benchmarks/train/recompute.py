"""Memory saved and time spent by computing activations again: bytes counted, gradients compared bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import benchmark, commands

_LAYERS, _WIDTH, _SAMPLES = 64, 256, 64
_TIMEOUT_S = 120.0
_PARTS = ("mlp", "transformer", "steps", "first_step")
_FIRST_STEP = """
import sys, time, torch
from torch import nn
model = nn.Sequential(*[layer for _ in range(64) for layer in (nn.Linear(16, 16), nn.ReLU())])
x = torch.ones(4, 16)
began_s = time.perf_counter()
if sys.argv[1] == "ours":
    from orchestray.trainers.parallel.recompute import recompute
    recompute(model, "sqrt")
    model(x).sum().backward()
else:
    from torch.utils.checkpoint import checkpoint_sequential
    checkpoint_sequential(model, 8, x, use_reentrant=False).sum().backward()
open(sys.argv[2], "w").write(str(time.perf_counter() - began_s))
"""


def add_options(parser: Any) -> None:
    parser.add_argument("--only", nargs="+", choices=_PARTS, default=_PARTS, metavar="NAME")


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    import torch

    torch.set_num_threads(1)
    rounds = options.rounds(9, quick=2)
    report.settings = {"rounds": rounds, "layers": _LAYERS, "width": _WIDTH, "samples": _SAMPLES, "threads": 1}
    parts: dict[str, Callable[[], None]] = {
        "mlp": lambda: _bytes_of_mlp(report),
        "transformer": lambda: _bytes_of_transformer(report),
        "steps": lambda: _step_times(report, rounds),
        "first_step": lambda: _first_step(report, options.rounds(3), options.workspace),
    }
    for name in options.arguments.only:
        parts[name]()
    report.notes += [
        (
            "Bytes are those of all tensors kept for the backward pass at once, each storage counted once, parameters "
            "and the batch not: `orchestray.trainers.parallel.recompute.ActivationMeter`."
        ),
        "torch's is `torch.utils.checkpoint.checkpoint_sequential` without reentrance, in as many segments as ours.",
        "The first step is that of a new process, after `import torch`: torch's checkpoint imports torch._dynamo.",
    ]


def _bytes_of_mlp(report: benchmark.Report) -> None:
    model, x, loss = _mlp()
    none, plain = _peak(model, x, loss, "none")
    sqrt, again = _peak(model, x, loss, "sqrt")
    report.add(f"peak of activations, MLP of {_LAYERS} layers, none", "KB", [none / 1e3])
    report.add(f"peak of activations, MLP of {_LAYERS} layers, sqrt", "KB", [sqrt / 1e3])
    report.compare(f"peak of activations, MLP of {_LAYERS} layers, sqrt / none", [sqrt], [none])
    report.goal("peak of activations, sqrt / none", sqrt / none, 0.35)
    report.goal("gradients that differ in a bit, sqrt", _num_different(plain, again), 0.0)


def _bytes_of_transformer(report: benchmark.Report) -> None:
    import torch

    from orchestray.trainers.tasks.python_source import PythonSource

    task = PythonSource(context=64, width=128, depth=8, heads=4, dropout=0.1)
    torch.manual_seed(0)
    model = task.build_model()
    x = torch.randint(256, (16, 64))
    batch = {"targets": torch.randint(256, (16, 64))}

    def loss(outputs: Any) -> Any:
        return task.loss(outputs, batch)

    none, plain = _peak(model, x, loss, "none")
    blocks, again = _peak(model, x, loss, "blocks")
    report.add("peak of activations, transformer of 8 blocks, none", "KB", [none / 1e3])
    report.add("peak of activations, transformer of 8 blocks, blocks", "KB", [blocks / 1e3])
    report.compare("peak of activations, transformer of 8 blocks, blocks / none", [blocks], [none])
    report.goal("gradients that differ in a bit, blocks", _num_different(plain, again), 0.0)


def _step_times(report: benchmark.Report, rounds: int) -> None:
    """Time forward and backward passes in turns."""
    from torch.utils.checkpoint import checkpoint_sequential

    from orchestray.trainers.parallel.recompute import recompute

    model, x, loss = _mlp()
    taken: dict[str, list[float]] = {"none": [], "sqrt": [], "torch": []}

    def step(name: str, forward: Callable[[], Any]) -> None:
        changed = recompute(model, "sqrt" if name == "sqrt" else "none")
        for _ in range(2):  # the first one warms up
            began_s = time.perf_counter()
            loss(forward()).backward()
            took_s = time.perf_counter() - began_s
        taken[name].append(1e3 * took_s)
        changed.undo()

    sides = {
        "none": lambda: step("none", lambda: model(x)),
        "sqrt": lambda: step("sqrt", lambda: model(x)),
        "torch": lambda: step("torch", lambda: checkpoint_sequential(model, 8, x, use_reentrant=False)),
    }
    benchmark.alternate(sides, rounds, benchmark.say)
    for name, values in taken.items():
        report.add(f"forward and backward, MLP of {_LAYERS} layers, {name}", "ms", values)
    report.compare("forward and backward, sqrt / none", taken["sqrt"], taken["none"])
    report.compare("forward and backward, sqrt / torch", taken["sqrt"], taken["torch"])


def _first_step(report: benchmark.Report, rounds: int, workspace: Path) -> None:
    taken: dict[str, list[float]] = {"ours": [], "torch": []}

    def call(name: str) -> None:
        out = workspace / f"first-step-{name}-{len(taken[name])}"
        commands.run_command(commands.python("-c", _FIRST_STEP, name, str(out)), _TIMEOUT_S)
        taken[name].append(float(out.read_text(encoding="utf-8")))

    benchmark.alternate({"ours": lambda: call("ours"), "torch": lambda: call("torch")}, rounds, benchmark.say)
    for name, values in taken.items():
        report.add(f"first step of a process, {name}", "s", values)
    report.compare("first step of a process, ours / torch", taken["ours"], taken["torch"])


def _mlp() -> tuple[Any, Any, Callable[[Any], Any]]:
    import torch

    from harness.tasks import Mlp

    task = Mlp(widths=[_WIDTH] * (_LAYERS + 1))
    torch.manual_seed(0)
    batch = {"targets": torch.randint(10, (_SAMPLES,))}
    return task.build_model(), torch.randn(_SAMPLES, _WIDTH), lambda outputs: task.loss(outputs, batch)


def _peak(model: Any, x: Any, loss: Callable[[Any], Any], how: str) -> tuple[int, list[Any]]:
    """Return the most bytes of activations in a step, and its gradients."""
    import torch

    from orchestray.trainers.core.rng import RngKey, seed_modules
    from orchestray.trainers.parallel.recompute import ActivationMeter, recompute

    draw = RngKey(seed=0, step=1)
    seeded = seed_modules(model, draw, torch.device("cpu"))
    meter = ActivationMeter(model)
    changed = recompute(model, how, draw=draw, meter=meter)
    model.zero_grad()
    with meter.watching(x):
        loss(model(x)).backward()
    changed.undo()
    for handle in seeded:
        handle.remove()
    return meter.peak_bytes, [parameter.grad.clone() for parameter in model.parameters()]


def _num_different(ours: list[Any], theirs: list[Any]) -> float:
    import torch

    return float(sum(not torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)))


if __name__ == "__main__":
    benchmark.run(
        "recompute",
        "A step whose activations are computed again in the backward pass, against one that keeps them and against "
        "torch.utils.checkpoint.",
        measure,
        add_options,
    )
