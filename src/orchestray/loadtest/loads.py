"""The kinds of load: requests at given times (open loop), or clients that wait for answers (closed loop)."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestray.loadtest.arrivals import bursts, poisson
from orchestray.platform.errors import ConfigError

_AT_ONCE_S = 1e-9


@dataclass(frozen=True)
class OpenLoop:
    """A load of Poisson arrivals at `rate_per_s`; with `burst_size` > 1 in bursts of that mean size (geometric).

    All requests of a burst come at once. The rate counts single requests in either case.
    """

    rate_per_s: float
    burst_size: float = 1.0

    def times_s(self, seed: int) -> Iterator[float]:
        """Return an endless iterator of the times at which requests are due, in seconds since the start."""
        rng = random.Random(seed)
        if self.burst_size > 1:
            return itertools.accumulate(bursts(self.rate_per_s, self.burst_size, _AT_ONCE_S, rng))
        return itertools.accumulate(poisson(self.rate_per_s, rng))

    def __str__(self) -> str:
        burst = f" in bursts of {self.burst_size:g}" if self.burst_size > 1 else ""
        return f"{self.rate_per_s:g} requests/s{burst}"


@dataclass(frozen=True)
class Trace:
    """A load of requests at recorded times, in seconds since the start."""

    recorded_s: tuple[float, ...]

    @property
    def duration_s(self) -> float:
        """Seconds from the first request to just after the last."""
        return self.recorded_s[-1] + 1e-6

    def times_s(self, seed: int) -> Iterator[float]:
        """Return an iterator of the times at which requests are due; the seed is not used."""
        return iter(self.recorded_s)

    def __str__(self) -> str:
        return f"a trace of {len(self.recorded_s)} requests"


@dataclass(frozen=True)
class ClosedLoop:
    """A load of `num_clients` clients; each sends its next request `think_s` after the answer to its last."""

    num_clients: int
    think_s: float = 0.0

    def share(self, rank: int, num_processes: int) -> ClosedLoop:
        """Return the clients of one of several processes."""
        return ClosedLoop(len(range(rank, self.num_clients, num_processes)), self.think_s)

    def __str__(self) -> str:
        think = f", {self.think_s * 1e3:g} ms of thought" if self.think_s else ""
        return f"{self.num_clients} closed-loop client{'s' if self.num_clients > 1 else ''}{think}"


Load = OpenLoop | Trace | ClosedLoop


def read_trace(path: Path) -> Trace:
    """Read a trace: one request time per line, in seconds from any origin, ascending; `#` begins a comment.

    Raises:
        ConfigError: the file is missing, or a line is not a number or is earlier than the one before.
    """
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace {path}: cannot be read: {error}") from None
    times_s: list[float] = []
    for number, text in enumerate(lines, start=1):
        try:
            times_s += [float(text)] if text else []
        except ValueError:
            times_s.append(math.nan)
        if not all(map(math.isfinite, times_s[-1:])) or times_s[-2:] != sorted(times_s[-2:]):
            wanted = "must be a time in seconds, not before the line above"
            raise ConfigError(f"--trace {path}: line {number}: {wanted}, got {text!r}")
    if not times_s:
        raise ConfigError(f"--trace {path}: has no times; a trace is a file with the time of a request a line, in s")
    return Trace(tuple(time_s - times_s[0] for time_s in times_s))
