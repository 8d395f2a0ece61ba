"""Cost of replicas on rented machines: a cloud's price on the times for which they are there."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_H_S = 3600.0


@dataclass(frozen=True)
class Price:
    """Price of a machine that holds one replica, billed from its start to its end, as clouds bill by use.

    Raises:
        ValueError: a price or a time is negative or not finite, or `increment_s` is 0.
    """

    usd_per_replica_h: float
    increment_s: float = 1.0
    """Time is billed in whole steps of this."""
    minimum_s: float = 0.0
    """A replica that was there for less is billed for this."""

    def __post_init__(self) -> None:
        for name, value in (("usd_per_replica_h", self.usd_per_replica_h), ("minimum_s", self.minimum_s)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}: must be >= 0 and finite, got {value}")
        if not 0 < self.increment_s < math.inf:
            raise ValueError(f"increment_s: must be > 0 and finite, got {self.increment_s}")

    def billed_s(self, lifetime_s: float) -> float:
        """Return the seconds billed for a replica that was there for `lifetime_s`: whole steps, but for rounding."""
        steps = math.ceil(max(lifetime_s, self.minimum_s) / self.increment_s - 1e-9)
        return steps * self.increment_s


def cost_usd(lifetimes_s: Iterable[float], price: Price) -> float:
    """Return the US dollars for replicas that were each there for these seconds: the sum of billed hours x price.

    What else a cloud charges for (disks, traffic, a load balancer) is not in it.

    Args:
        lifetimes_s: one a replica, its start included, such as `Rehearsal.lifetimes_s`.
        price: what a replica's machine costs.
    """
    return sum(price.billed_s(lifetime_s) for lifetime_s in lifetimes_s) / _H_S * price.usd_per_replica_h
