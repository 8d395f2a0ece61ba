"""How one network is laid out over workers: data x tensor x pipeline, and which part of each tensor a worker holds."""

from __future__ import annotations

if __name__ != "orchestray.trainers.layout":
    raise ImportError("import orchestray.trainers.layout: under another name its modules would be loaded twice")
