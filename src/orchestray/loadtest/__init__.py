"""A load generator for any HTTP endpoint, used by `orchestray bench`."""

from __future__ import annotations

from orchestray.loadtest.errors import EndpointError
from orchestray.loadtest.loads import ClosedLoop, Load, OpenLoop, Trace, read_trace
from orchestray.loadtest.measure import Measured, measure
from orchestray.loadtest.plan import Plan, Target

__all__ = [
    "ClosedLoop",
    "EndpointError",
    "Load",
    "Measured",
    "OpenLoop",
    "Plan",
    "Target",
    "Trace",
    "measure",
    "read_trace",
]
