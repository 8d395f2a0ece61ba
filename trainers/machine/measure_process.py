"""The memory of a worker's process that has built nothing yet: `python -m` this module prints its bytes.

A cluster is started for it, as a run starts one: how much of torch, Ray and the rest is in memory depends on how the
process comes to be.
"""

from __future__ import annotations

import contextlib
import sys

import psutil

from orchestray.platform.actors.gang import Gang
from orchestray.platform.actors.placement import Shape
from orchestray.platform.cluster.cluster import connect


def process_bytes(hosted: str) -> int:
    """Return the resident set of a worker that has imported what it hosts ("module:callable") and built nothing."""
    with contextlib.closing(connect("local")) as cluster:
        gang = Gang(cluster, Shape("worker", 1, cpus_per_member=0.0))
        gang.gather_one(gang.slots[0].actor.prepare.remote(hosted), 0)
        ((_, _, identity),) = gang.identify()
        return int(psutil.Process(identity.pid).memory_info().rss)


if __name__ == "__main__":
    sys.stdout.write(f"{process_bytes(sys.argv[1])}\n")
