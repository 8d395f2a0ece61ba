"""A load generator for HTTP endpoints, of any make: `orchestray bench`, and what it is made of."""

from __future__ import annotations

from orchestray.serving.load.errors import EndpointError
from orchestray.serving.load.loads import ClosedLoop, Load, OpenLoop, Trace, read_trace
from orchestray.serving.load.measure import Measured, measure
from orchestray.serving.load.plan import Plan, Target

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
