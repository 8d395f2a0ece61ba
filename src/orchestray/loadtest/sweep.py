"""Latency against rate: a closed loop finds the endpoint's capacity, then open loops run below and above it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestray.loadtest.loads import ClosedLoop, OpenLoop
from orchestray.loadtest.measure import Measured
from orchestray.loadtest.plan import Plan

CLIENTS = 64
SHARES = (0.1, 0.3, 0.5, 0.7, 0.85, 0.95, 1.1)
_SUSTAINED = 0.95
_OVERLOADED = 0.8


@dataclass(frozen=True)
class Sweep:
    """Loads of rising rate, and the closed loop from which the rates were derived if none were given."""

    saturated: Measured | None
    points: tuple[Measured, ...]

    @property
    def sustained(self) -> Measured | None:
        """Highest rate with which the endpoint kept up: at least 95 % were answered, within the deadline if any."""
        return next((point for point in reversed(self.points) if _kept_up(point)), None)

    def summary(self) -> dict[str, Any]:
        """Return all results as numbers for JSON."""
        best = self.sustained
        return {
            "saturated": self.saturated.summary() if self.saturated else None,
            "points": [point.summary() for point in self.points],
            "sustained_per_s": None if best is None else best.summary()["offered_per_s"],
        }


def _kept_up(point: Measured) -> bool:
    good = point.tally.num_in_time if point.plan.deadline_s is not None else point.tally.latency.num
    return good >= _SUSTAINED * point.tally.num_offered and point.answered_per_s >= _SUSTAINED * point.offered_per_s


def run_sweep(
    plan: Plan,
    measure: Callable[[Plan], Measured],
    *,
    rates_per_s: Sequence[float] = (),
    on_point: Callable[[Measured], None] = lambda _: None,
) -> Sweep:
    """Measure each rate in turn; of derived ones none after the first with which the endpoint is far from keeping up.

    Args:
        plan: everything but the rates; the bursts of its load are kept.
        measure: measures one plan.
        rates_per_s: in requests/s; default: shares of the rate of `CLIENTS` closed-loop clients.
        on_point: called with the result of each load.
    """
    saturated = None
    derived = not rates_per_s
    if derived:
        saturated = measure(replace(plan, load=ClosedLoop(CLIENTS)))
        on_point(saturated)
        if saturated.answered_per_s == 0:
            return Sweep(saturated, ())
        rates_per_s = [_round(share * saturated.answered_per_s) for share in SHARES]
    burst_size = plan.load.burst_size if isinstance(plan.load, OpenLoop) else 1.0
    points: list[Measured] = []
    for rate_per_s in sorted(rates_per_s):
        point = measure(replace(plan, load=OpenLoop(rate_per_s, burst_size)))
        points.append(point)
        on_point(point)
        # Rates that the caller named are all measured: one stall of a short load is not an overload.
        if derived and point.answered_per_s < _OVERLOADED * point.offered_per_s:
            break
    return Sweep(saturated, tuple(points))


def _round(value: float) -> float:
    """Round a rate to two digits, which are enough and easier to read."""
    return float(f"{value:.2g}")
