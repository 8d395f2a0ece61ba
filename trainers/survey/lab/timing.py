"""Times of several ways to compute the same thing, taken in turns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_LEAST_S = 2e-3
"""Least seconds of a measurement: what takes less is repeated."""


def times_s(
    ways: Mapping[str, Callable[[], Any]], rounds: int, clock: Callable[[], float] = perf_counter
) -> dict[str, list[float]]:
    """Return the seconds of each way in each round, after one call of each that is not counted.

    A round calls every way, and the order turns from round to round. So a machine that is busy for a while slows all.

    Args:
        ways: what is timed, by name.
        rounds: number of rounds.
        clock: returns seconds: of the wall, or of this thread alone, which others on the machine hardly change.
    """
    repeats = {}
    for name, way in ways.items():
        way()
        began_s = clock()
        way()
        repeats[name] = max(1, round(_LEAST_S / max(1e-9, clock() - began_s)))
    names = list(ways)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        shift = number % len(names)
        for name in [*names[shift:], *names[:shift]]:
            way = ways[name]
            began_s = clock()
            for _ in range(repeats[name]):
                way()
            found[name].append((clock() - began_s) / repeats[name])
    return found


@contextmanager
def quiet_profiler() -> Iterator[Any]:  # a `profile`, whose methods torch has not typed
    """Have torch's profiler look at the CPU inside, and drop what its C++ code writes when it starts and stops."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            yield seen
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use some threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return the same normal random numbers at each call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
