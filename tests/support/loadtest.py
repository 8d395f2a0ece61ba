"""Measurements of servers whose capacity is known."""

from __future__ import annotations

from orchestray.loadtest.loads import OpenLoop
from orchestray.loadtest.plan import Plan
from orchestray.loadtest.results import Measured
from orchestray.loadtest.tally import Tally


def measured_at(plan: Plan, capacity_per_s: float) -> Measured:
    """Return what is measured in a second of a server that answers up to a rate: latencies grow with the load."""
    tally = Tally(0.0, 1.0)
    rate = plan.load.rate_per_s if isinstance(plan.load, OpenLoop) else capacity_per_s
    for number in range(int(rate)):
        due_s = number / rate
        tally.record(due_s, due_s, max(due_s + 0.01, (number + 1) / capacity_per_s), 200)
    return Measured(plan, tally, (0.1,))
