"""Splitting the layers of one network over a group of workers, so that the model's own code need not change."""

from __future__ import annotations

if __name__ != "orchestray.trainers.tensor":
    raise ImportError("import orchestray.trainers.tensor: under another name its modules would be loaded twice")
