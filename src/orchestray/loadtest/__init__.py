"""A load generator for any HTTP endpoint, used by `orchestray bench`."""

from __future__ import annotations

from orchestray.loadtest.loads import ClosedLoop, OpenLoop
from orchestray.loadtest.measure import measure
from orchestray.loadtest.plan import Plan, Target
from orchestray.loadtest.results import EndpointError, Measured

__all__ = ["ClosedLoop", "EndpointError", "Measured", "OpenLoop", "Plan", "Target", "measure"]
