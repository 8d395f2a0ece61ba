"""Nodes that are about to leave the cluster, as a cloud announces it for spot machines: Ray calls that draining."""

from __future__ import annotations

import math
import time

from orchestray.platform.cluster import ray_internals


def draining_nodes() -> dict[str, float]:
    """Return the seconds that each node has left, by the id of the node; infinity if it has no deadline.

    Asks the cluster that this process is connected to.
    """
    deadlines = ray_internals.find("ray._private.state:state").get_draining_nodes()
    now_ms = time.time() * 1000
    return {node: math.inf if at_ms == 0 else max(0.0, (at_ms - now_ms) / 1000) for node, at_ms in deadlines.items()}
