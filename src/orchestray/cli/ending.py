"""The end of a command that may have started Ray."""

from __future__ import annotations

import sys


def leave_cluster() -> None:
    """Close the cluster that was started, at once: the interpreter's normal exit would wait for Ray."""
    if "ray" not in sys.modules:
        return
    from orchestray.platform.cluster.cluster import current

    cluster = current()
    if cluster is not None:
        cluster.close()
