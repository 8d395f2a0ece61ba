"""The names of classes of the user's own in a config: `path/to/file.py:Class`."""

from __future__ import annotations

from pathlib import Path


def names_class(run: str) -> bool:
    """Return True if a `run` of a config is a class or a function in a file, and no run directory."""
    place, colon, name = run.rpartition(":")
    return bool(colon) and place.endswith(".py") and name.isidentifier()


def class_name(run: str) -> str:
    """Return the name under which a class is served by default: that of its file."""
    return Path(run.rpartition(":")[0]).stem
