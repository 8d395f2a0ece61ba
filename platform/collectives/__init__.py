"""All-reduces as the survey has them: schedules as data, what they cost, and ways to carry them out."""

from __future__ import annotations

if __name__ != "orchestray.platform.collectives":
    raise ImportError("import orchestray.platform.collectives, not a copy of it under another name")

__all__: list[str] = []
