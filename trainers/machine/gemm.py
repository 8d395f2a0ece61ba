"""Times of products of matrices, measured on a grid of shapes and interpolated between them (survey, [193])."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from orchestray.platform.errors import ConfigError


@dataclass(frozen=True)
class GemmTable:
    """Seconds of products of matrices [m, k] and [k, n], for each m, n and k of some sizes.

    Args:
        sizes: sizes of each dimension, rising, the first at least 1.
        times_s: seconds of each shape; the last dimension, k, changes fastest.

    Raises:
        ConfigError: a size or a time is missing, or is not above 0.
    """

    sizes: tuple[int, ...]
    times_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.sizes) < 2 or list(self.sizes) != sorted({*self.sizes}) or self.sizes[0] < 1:
            raise ConfigError(f"a table of products needs two sizes or more, rising from 1, got {list(self.sizes)}")
        if len(self.times_s) != len(self.sizes) ** 3 or min(self.times_s) <= 0:
            raise ConfigError(f"a table of products needs {len(self.sizes)}^3 times above 0, got {len(self.times_s)}")

    @cached_property
    def _logs(self) -> tuple[list[float], list[float]]:
        return [math.log(size) for size in self.sizes], [math.log(time_s) for time_s in self.times_s]

    def seconds(self, m: float, n: float, k: float) -> float:
        """Return the seconds of a product of matrices [m, k] and [k, n].

        The logarithm of the time is linear in those of m, n and k between the sizes of the table. Beyond the largest
        the time grows like the work; below the smallest it stays.
        """
        log_sizes, log_times = self._logs
        count, scale, log_s = len(log_sizes), 1.0, 0.0
        corners: list[tuple[int, float]] = [(0, 1.0)]
        for size in (m, n, k):
            if size > self.sizes[-1]:
                scale *= size / self.sizes[-1]
            log_size = math.log(min(max(size, self.sizes[0]), self.sizes[-1]))
            below = min(bisect_right(log_sizes, log_size), count - 1) - 1
            part = (log_size - log_sizes[below]) / (log_sizes[below + 1] - log_sizes[below])
            corners = [
                (place * count + below + step, weight * share)
                for place, weight in corners
                for step, share in ((0, 1 - part), (1, part))
                if share
            ]
        for place, weight in corners:
            log_s += weight * log_times[place]
        return scale * math.exp(log_s)

    def flops_per_s(self, m: float, n: float, k: float) -> float:
        """Return the operations a second of a product: m n k multiplications and as many additions."""
        return 2 * m * n * k / self.seconds(m, n, k)

    @cached_property
    def peak_flops_per_s(self) -> float:
        """Operations a second of the fastest shape of the table."""
        return max(self.flops_per_s(*shape) for shape in shapes(self.sizes))

    def to_json(self) -> dict[str, Any]:
        return {"sizes": list(self.sizes), "times_s": [float(f"{time_s:.4g}") for time_s in self.times_s]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GemmTable:
        return cls(tuple(map(int, data["sizes"])), tuple(map(float, data["times_s"])))


def shapes(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return every (m, n, k) of these sizes, in the order of a table's times."""
    return [(m, n, k) for m in sizes for n in sizes for k in sizes]
