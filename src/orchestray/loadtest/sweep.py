"""Latency against rate: a closed loop finds the endpoint's capacity, then open loops run below and above it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from orchestray.loadtest.loads import ClosedLoop, OpenLoop
from orchestray.loadtest.plan import Plan
from orchestray.loadtest.results import Measured

CLIENTS = 64
SHARES = (0.1, 0.3, 0.5, 0.7, 0.85, 0.95, 1.1)
_SUSTAINED = 0.95
_OVERLOADED = 0.8


def sweep(plan: Plan, measure: Callable[[Plan], Measured], rates_per_s: Sequence[float] = ()) -> Iterator[Measured]:
    """Measure each rate in turn; of derived ones none after the first with which the endpoint is far from keeping up.

    Args:
        plan: everything but the rates; the bursts of its load are kept.
        measure: measures one plan.
        rates_per_s: in requests/s; default: shares of the rate of `CLIENTS` closed-loop clients.

    Yields:
        The measurement of the clients, if there are no rates, and then one for each rate.
    """
    is_derived = not rates_per_s
    if is_derived:
        saturated = measure(replace(plan, load=ClosedLoop(CLIENTS)))
        yield saturated
        if saturated.answered_per_s == 0 or saturated.is_interrupted:
            return
        # Two digits are enough, and easier to read.
        rates_per_s = [float(f"{share * saturated.answered_per_s:.2g}") for share in SHARES]
    burst_size = plan.load.burst_size if isinstance(plan.load, OpenLoop) else 1.0
    for rate_per_s in sorted(rates_per_s):
        point = measure(replace(plan, load=OpenLoop(rate_per_s, burst_size)))
        yield point
        # Rates that the caller named are all measured: one stall of a short load is not an overload.
        if point.is_interrupted or (is_derived and point.answered_per_s < _OVERLOADED * point.offered_per_s):
            return


def sustained(points: Sequence[Measured]) -> Measured | None:
    """Return the last load with which the endpoint kept up.

    At least 95 % of its requests were answered then, within the deadline if there is one.
    """
    for point in reversed(points):
        good = point.tally.num_in_time if point.plan.deadline_s is not None else point.tally.latency.num
        least = _SUSTAINED * point.tally.num_offered
        if good >= least and point.answered_per_s >= _SUSTAINED * point.offered_per_s:
            return point
    return None
