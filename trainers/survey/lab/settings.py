"""The settings of torch on a CPU: oneDNN's kernels on and off, and the number of threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from orchestray.trainers.survey.lab.exhibit import Exhibit
from orchestray.trainers.survey.lab.timing import quiet_profiler, seeded, threads, times_s


def operations() -> Mapping[str, Callable[[], Tensor]]:
    """Return usual operations on tensors of middling size."""
    torch.manual_seed(0)
    images, features, words = seeded(8, 32, 28, 28), seeded(256, 512), seeded(32, 8, 64)
    convolution, pool, norm = nn.Conv2d(32, 32, 3, padding=1), nn.MaxPool2d(2), nn.BatchNorm2d(32).eval()
    linear, recurrent = nn.Linear(512, 512), nn.LSTM(64, 64)
    modules: dict[str, tuple[nn.Module, Tensor]] = {
        "convolution 3x3": (convolution, images),
        "fully connected": (linear, features),
        "max pooling": (pool, images),
        "batch normalisation": (norm, images),
        "LSTM": (recurrent, words),
    }
    found: dict[str, Callable[[], Tensor]] = {name: partial(_outputs, *one) for name, one in modules.items()}
    found["product of matrices"] = partial(torch.matmul, seeded(512, 512), seeded(512, 512, seed=1))
    found["exp of each element"] = partial(torch.exp, seeded(1_000_000))
    return found


def _outputs(module: nn.Module, x: Tensor) -> Tensor:
    found: Any = module(x)
    out: Tensor = found[0] if isinstance(found, tuple) else found
    return out


def onednn(rounds: int = 7) -> Exhibit:
    """Compare torch's operations with and without the kernels of oneDNN."""
    rows: list[list[Any]] = []
    with torch.no_grad():
        for name, compute in operations().items():
            with_it, without = compute(), _without(compute)
            off = float((with_it - without).abs().max())
            taken = times_s({"on": compute, "off": partial(_without, compute)}, rounds)
            on_s, off_s = (median(taken[which]) for which in ("on", "off"))
            calls = [_calls_of_onednn(each) for each in (compute, partial(_without, compute))]
            rows.append([name, on_s * 1e3, off_s * 1e3, off_s / on_s, off, *calls])
    used = [f"{row[0]} ({row[3]:.2g} times)" for row in rows if row[3] >= 1.1]
    findings = [f"Results differ by {max(row[4] for row in rows):.1g} at most."]
    findings.append(f"Faster with oneDNN: {', '.join(used)}." if used else "Nothing is faster with oneDNN here.")
    findings.append(f"Its kernels compute {', '.join(row[0] for row in rows if row[5]) or 'nothing'} when they are on.")
    columns = [
        "operation",
        "on, ms",
        "off, ms",
        "off / on",
        "largest difference",
        "its kernels, on",
        "its kernels, off",
    ]
    return Exhibit("onednn", "Kernels of oneDNN on and off", columns, rows, findings)


def _calls_of_onednn(compute: Callable[[], Tensor]) -> int:
    """Return how many kernels of oneDNN a computation calls, as torch's profiler names them."""
    with quiet_profiler() as seen:
        compute()
    return sum(event.name.startswith("aten::mkldnn") for event in seen.events())


@contextmanager
def without_onednn() -> Iterator[None]:
    """Let torch use its other kernels inside."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


def _without(compute: Callable[[], Tensor]) -> Tensor:
    with without_onednn():
        return compute()


def thread_sweep(rounds: int = 7, counts: Sequence[int] | None = None) -> Exhibit:
    """Compare operations on 1, 2, ... threads, as many as there are cores for this process, and at least two."""
    counts = counts or sorted({1, 2, len(os.sched_getaffinity(0))})
    rows: list[list[Any]] = []
    with torch.no_grad():
        for name, compute in operations().items():
            taken = {}
            for count in counts:
                with threads(count):
                    taken[count] = median(times_s({name: compute}, rounds)[name])
            ratios = [taken[counts[0]] / taken[count] for count in counts[1:]]
            rows.append([name, *(taken[count] * 1e3 for count in counts), *ratios])
    most = counts[-1]
    best = max(rows, key=lambda row: float(row[-1]))
    worst = min(rows, key=lambda row: float(row[-1]))
    findings = [
        f"On {most} threads {best[0]} is {best[-1]:.2g} times as fast as on one, and {worst[0]} {worst[-1]:.2g} times."
    ]
    columns = ["operation", *(f"{count} threads, ms" for count in counts)]
    return Exhibit(
        "threads",
        "Threads of one process",
        [*columns, *(f"{count} / 1" for count in counts[1:])],
        rows,
        findings,
    )
