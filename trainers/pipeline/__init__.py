"""Pipelines: the layers in stages on different workers, micro-batches flowing through them by a schedule."""

from __future__ import annotations

if __name__ != "orchestray.trainers.pipeline":
    raise ImportError("import orchestray.trainers.pipeline: under another name its modules would be loaded twice")
