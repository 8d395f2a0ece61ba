"""A step of each named optimizer by our call of torch's kernels, against torch.optim's class with the same kernel."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness import benchmark

if TYPE_CHECKING:
    from torch import Tensor

_SIZES = {"10 k": (10_000, 20), "1 M": (1_000_000, 100), "20 M": (20_000_000, 200)}
"""Elements of a model, and the number of parameters that they are spread over."""
_OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {}),
    "sgd, momentum": ("SGD", {"momentum": 0.9}),
    "adagrad": ("Adagrad", {}),
    "rmsprop": ("RMSprop", {}),
    "adam": ("Adam", {}),
    "adamw": ("AdamW", {}),
}
_NO_FUSED_KERNEL = {"rmsprop"}
_TURN_S = 0.01
"""Seconds of a turn, at least: short steps are repeated."""
_WORTH_IT, _NOT_SLOWER = 1 / 1.03, 1.03
_LR = 1e-4
_MAKE = """
import sys, time
import torch
from orchestray.trainers.optim import factory
parameter = torch.zeros(3)
began_s = time.perf_counter()
if sys.argv[1] == "ours":
    factory.make_optimizer("sgd", lr=0.1).init([("weight", parameter)])
else:
    torch.optim.SGD([parameter], lr=0.1)
print(time.perf_counter() - began_s)
"""


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    import torch

    torch.set_num_threads(1)
    rounds = options.rounds(15, quick=2)
    report.settings = {"rounds": rounds, "threads": 1, "type": "float32", "torch": torch.__version__}
    rows = []
    for size, (num_elements, num_parameters) in _SIZES.items():
        for shape, parts in (("one flat tensor", 1), (f"{num_parameters} parameters", num_parameters)):
            found = [
                _measure_one(report, f"{size}, {shape}", name, num_elements, parts, rounds) for name in _OPTIMIZERS
            ]
            rows += [row for row, _ in found]
            limit = _NOT_SLOWER if size == "20 M" else _WORTH_IT
            median = statistics.median(ratio for _, ratio in found)
            report.goal(f"{size} elements, {shape}: ours / torch.optim, median of the optimizers", median, limit)
    report.table(
        ["elements", "optimizer", "ours ms", "torch.optim ms", "its default (foreach) ms", "ours / torch"], rows
    )
    made = {side: [_seconds_to_make(side) for _ in range(options.rounds(3))] for side in ("ours", "torch")}
    report.compare(
        "time to make an optimizer, once a process",
        report.add("make an optimizer: ours", "s", made["ours"]).values,
        report.add("make an optimizer: torch.optim", "s", made["torch"]).values,
    )
    report.notes += [
        "torch.optim is its class with fused=True, or with foreach=True where it has no fused kernel (rmsprop).",
        "The classes of torch.optim import torch's compiler when the first is made; our call of the kernels does not.",
        f"Below {_WORTH_IT:.3f} our own calls are worth their lines.",
    ]


def _measure_one(
    report: benchmark.Report, where: str, name: str, num_elements: int, parts: int, rounds: int
) -> tuple[list[str], float]:
    sides = _sides(name, num_elements, parts)
    times_ms: dict[str, list[float]] = {side: [] for side in sides}
    repeats = {side: _repeats(step) for side, step in sides.items()}

    def turn(side: str) -> Callable[[], None]:
        def run() -> None:
            began_s = time.perf_counter()
            for _ in range(repeats[side]):
                sides[side]()
            times_ms[side].append((time.perf_counter() - began_s) / repeats[side] * 1e3)

        return run

    benchmark.alternate({side: turn(side) for side in sides}, rounds, lambda _: None)
    benchmark.say(f"{where}: {name}")
    ours, peer = times_ms["ours"], times_ms["torch"]
    ratio = report.compare(f"{where}: {name}", ours, peer)
    medians = [report.add(f"{where}: {name}, {side}", "ms", times_ms[side]).median for side in sides]
    shown = [f"{median:.4g}" for median in medians]
    return [where, name, *shown, *([] if len(shown) == 3 else [shown[-1]]), f"{ratio:.3f}"], ratio


def _sides(name: str, num_elements: int, parts: int) -> dict[str, Callable[[], Any]]:
    import torch

    from orchestray.trainers.optim.factory import make_optimizer

    kind, arguments = _OPTIMIZERS[name]

    def drawn() -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(num_elements // parts, generator=generator) for _ in range(parts)]

    gradients, ours = drawn(), drawn()
    own = make_optimizer(name.partition(",")[0], **arguments, lr=_LR)
    own.init([(str(index), tensor) for index, tensor in enumerate(ours)])
    sides: dict[str, Callable[[], Any]] = {"ours": lambda: own.step(ours, gradients, _LR)}
    kernels = ("foreach",) if name in _NO_FUSED_KERNEL else ("fused", "foreach")
    for side, kernel in zip(("torch", "foreach"), kernels, strict=False):
        parameters = drawn()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        sides[side] = getattr(torch.optim, kind)(parameters, lr=_LR, **arguments, **{kernel: True}).step
    return sides


def _repeats(step: Callable[[], Any]) -> int:
    """Return how often to repeat a step so that a turn has a length that can be measured."""
    step()
    began_s = time.perf_counter()
    step()
    return max(1, round(_TURN_S / (time.perf_counter() - began_s)))


def _seconds_to_make(side: str) -> float:
    done = subprocess.run([sys.executable, "-c", _MAKE, side], check=True, capture_output=True, text=True)
    return float(done.stdout)


if __name__ == "__main__":
    benchmark.run("optimizers", __doc__, measure)
