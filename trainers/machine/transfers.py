"""Times of messages and of collective operations by their bytes, between measured sizes and beyond them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from orchestray.platform.comm.allreduce.costs import AlphaBeta, cost_s
from orchestray.platform.errors import ConfigError

Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "exchange"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Collective operations. An exchange is a message to a partner and one from it, at the same time."""


@dataclass(frozen=True)
class Curve:
    """Seconds of an operation on some numbers of bytes.

    Args:
        sizes_bytes: numbers of bytes, rising.
        times_s: seconds of each.

    Raises:
        ConfigError: there are not two sizes, each with a time above 0.
    """

    sizes_bytes: tuple[int, ...]
    times_s: tuple[float, ...]

    def __post_init__(self) -> None:
        sizes, times = self.sizes_bytes, self.times_s
        if len(sizes) < 2 or list(sizes) != sorted({*sizes}) or sizes[0] < 1:
            raise ConfigError(f"the sizes of a transfer must rise from 1 byte, two or more of them, got {list(sizes)}")
        if len(times) != len(sizes) or min(times) <= 0:
            raise ConfigError(f"each size of a transfer needs a time above 0, got {list(times)}")

    @cached_property
    def fit(self) -> AlphaBeta:
        """Latency and seconds a byte that fit these times best."""
        return AlphaBeta.fit(self.sizes_bytes, self.times_s)

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds for `num_bytes`.

        Between two sizes the logarithm of the time is linear in that of the bytes. Beyond them the time follows the
        fitted latency and seconds a byte, from the last measured time on.
        """
        sizes, times = self.sizes_bytes, self.times_s
        for end, is_beyond in ((0, num_bytes <= sizes[0]), (-1, num_bytes >= sizes[-1])):
            if is_beyond:
                return times[end] * self.fit.time_s(max(0.0, num_bytes)) / self.fit.time_s(sizes[end])
        above = bisect_right(sizes, num_bytes)
        part = math.log(num_bytes / sizes[above - 1]) / math.log(sizes[above] / sizes[above - 1])
        return float(times[above - 1] ** (1 - part) * times[above] ** part)

    def to_json(self) -> dict[str, Any]:
        return {
            "sizes_bytes": list(self.sizes_bytes),
            "times_s": [float(f"{time_s:.4g}") for time_s in self.times_s],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Curve:
        return cls(tuple(map(int, data["sizes_bytes"])), tuple(map(float, data["times_s"])))


def ring_s(kind: Kind, ranks: int, num_bytes: float, link: AlphaBeta) -> float:
    """Return the seconds of a collective operation over links of one kind, by the formulas of rings and trees.

    Args:
        kind: all-reduce, reduce-scatter and all-gather go round a ring; a broadcast goes down a binomial tree.
        ranks: number of ranks.
        num_bytes: bytes of the tensor; of a reduce-scatter and an all-gather, of the whole; of an exchange, of each of
            the two messages.
        link: time of a message.
    """
    if ranks < 2:
        return 0.0
    if kind == "all_reduce":
        return cost_s("ring", ranks, num_bytes, link)
    if kind in ("reduce_scatter", "all_gather"):
        return cost_s("ring", ranks, num_bytes, link) / 2
    return link.time_s(num_bytes) * ((ranks - 1).bit_length() if kind == "broadcast" else 1)


@dataclass(frozen=True)
class CollectiveTimes:
    """Measured times of each kind of collective operation, by the number of ranks.

    Raises:
        ConfigError: a kind is missing, or was not measured with two ranks.
    """

    curves: Mapping[str, Mapping[int, Curve]]

    def __post_init__(self) -> None:
        for kind in KINDS:
            if 2 not in self.curves.get(kind, {}):
                raise ConfigError(f"the times of {kind} with 2 ranks are missing")
            if (least := min(self.curves[kind])) < 2:
                raise ConfigError(f"an operation needs 2 ranks or more: there are times of {kind} with {least}")

    def seconds(self, kind: Kind, ranks: int, num_bytes: float) -> float:
        """Return the seconds of a collective operation among `ranks` processes of the machine.

        Args:
            kind: kind of operation.
            ranks: number of ranks; for one that was not measured, the nearest that was is scaled by `ring_s`.
            num_bytes: bytes, as in `ring_s`.
        """
        if ranks < 2:
            return 0.0
        by_ranks = self.curves[kind]
        if ranks in by_ranks:
            return by_ranks[ranks].seconds(num_bytes)
        nearest = min(by_ranks, key=lambda each: (abs(math.log(each / ranks)), each))
        message = self.curves["exchange"][2].fit
        scale = ring_s(kind, ranks, num_bytes, message) / ring_s(kind, nearest, num_bytes, message)
        return by_ranks[nearest].seconds(num_bytes) * scale

    def to_json(self) -> dict[str, Any]:
        return {
            kind: {str(ranks): curve.to_json() for ranks, curve in by_ranks.items()}
            for kind, by_ranks in self.curves.items()
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CollectiveTimes:
        return cls(
            {
                kind: {int(ranks): Curve.from_json(curve) for ranks, curve in by_ranks.items()}
                for kind, by_ranks in data.items()
            }
        )
