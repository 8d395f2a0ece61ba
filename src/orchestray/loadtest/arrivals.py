"""Arrival processes of requests, as the seconds between one and the next."""

from __future__ import annotations

import random
from collections.abc import Iterator

Arrivals = Iterator[float]
"""Seconds between one request and the next."""


def poisson(rate_per_s: float, rng: random.Random) -> Arrivals:
    """Yield memoryless arrivals."""
    while True:
        yield rng.expovariate(rate_per_s)


def bursts(rate_per_s: float, mean_size: float, gap_s: float, rng: random.Random) -> Arrivals:
    """Yield bursts of geometric size, `gap_s` apart on average within a burst, at `rate_per_s` requests in all."""
    while True:
        yield rng.expovariate(rate_per_s / mean_size)
        while rng.random() < 1.0 - 1.0 / mean_size:
            yield rng.expovariate(1.0 / gap_s)
