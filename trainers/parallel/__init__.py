"""The part of the model that one worker holds, and the way samples take through all parts."""

from __future__ import annotations

if __name__ != "orchestray.trainers.parallel":
    raise ImportError("import orchestray.trainers.parallel: under another name its modules would be loaded twice")
