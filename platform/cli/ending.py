"""How a command that may have started Ray ends."""

from __future__ import annotations

import sys


def leave_cluster() -> None:
    """End what was started, at once: the interpreter's own way out would wait for Ray."""
    if "ray" not in sys.modules:
        return
    from orchestray.platform.cluster.cluster import current

    cluster = current()
    if cluster is not None:
        cluster.close()
