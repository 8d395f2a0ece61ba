"""The versions of what ran, so that a number can be measured again."""

from __future__ import annotations

import importlib.metadata
import platform
from contextlib import suppress
from functools import cache

WHAT_RAN = ("orchestray", "torch", "ray", "numpy", "pyarrow")


@cache
def installed_versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python and of packages, which are looked up, not imported; not those that are missing."""
    found = {"python": platform.python_version()}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
