"""Traces of torch's profiler: which copies and kernels ran when."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

Interval = tuple[float, float]


@contextlib.contextmanager
def tracing() -> Iterator[Any]:
    """Trace what runs in the block, on the GPU too if there is one."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as trace:
        yield trace


def on_device(trace: Any, word: str | None = None) -> list[Interval]:
    """Return begin and end, in microseconds, of what ran on the GPU: of names with this word, or of all kernels."""
    events = [each for each in trace.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    chosen = [
        each
        for each in events
        if (word in each.name if word else not each.name.startswith(("Memcpy", "Memset", "nccl")))
    ]
    return sorted((each.time_range.start, each.time_range.end) for each in chosen)


def calls(trace: Any, name: str) -> int:
    """Return how often the CPU called a function of CUDA's runtime."""
    return sum(each.name == name for each in trace.events())


def exposed_us(some: Iterable[Interval], others: Iterable[Interval]) -> float:
    """Return the microseconds of some intervals during which none of the others ran."""
    left = 0.0
    covered = list(_joined(others))
    for begin, end in _joined(some):
        left += end - begin
        left -= sum(max(0.0, min(end, until) - max(begin, since)) for since, until in covered)
    return left


def length_us(some: Iterable[Interval]) -> float:
    """Return the microseconds of intervals, counting each moment once."""
    return sum(end - begin for begin, end in _joined(some))


def _joined(intervals: Iterable[Interval]) -> Iterator[Interval]:
    """Yield intervals that do not touch, covering the same moments."""
    current: Interval | None = None
    for begin, end in sorted(intervals):
        if current is not None and begin <= current[1]:
            current = current[0], max(current[1], end)
            continue
        if current is not None:
            yield current
        current = begin, end
    if current is not None:
        yield current
