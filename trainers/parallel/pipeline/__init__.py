"""Pipeline parallelism: layers form stages on different workers, and micro-batches flow through them by a schedule."""

from __future__ import annotations

if __name__ != "orchestray.trainers.parallel.pipeline":
    raise ImportError(
        "import orchestray.trainers.parallel.pipeline: under another name its modules would be loaded twice"
    )
