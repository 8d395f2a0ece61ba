"""The part of a model that one worker holds, and how samples go through the whole of it."""

from __future__ import annotations

if __name__ != "orchestray.trainers.network":
    raise ImportError("import orchestray.trainers.network: under another name its modules would be loaded twice")
