"""The layout of a network over workers (data x tensor x pipeline), and each worker's part of each tensor."""

from __future__ import annotations

if __name__ != "orchestray.trainers.layout":
    raise ImportError("import orchestray.trainers.layout: under another name its modules would be loaded twice")
