"""The names of classes that a config in Python holds as they are: other processes find them by their names."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from orchestray.platform.errors import ConfigError

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def name_of_class(given: type, key: str) -> str:
    """Return "path/to/file.py:Class" or "package.module:Class" for a class.

    Args:
        given: the class.
        key: key of the config that holds it.

    Raises:
        ConfigError: other processes cannot find it.
    """
    name, module = given.__qualname__, sys.modules.get(given.__module__)
    if "." in name:
        raise ConfigError(
            f"config: {key}: class {name} is written inside a function or a class, where the workers cannot find it; "
            "write it at the left margin of a file"
        )
    file = getattr(module, "__file__", None)
    if file is None or not file.endswith(".py"):
        if given.__module__ == "__main__":
            raise ConfigError(f"config: {key}: {in_a_cell(name)}")
        return f"{given.__module__}:{name}"
    path = Path(file).absolute()
    return f"{given.__module__}:{name}" if str(path).startswith(_INSTALLED) else f"{path}:{name}"


def in_a_cell(name: str) -> str:
    """Return what to do with a class of a notebook, as a sentence without its subject."""
    return (
        f"class {name} is written in a notebook, where the workers, which are other processes, cannot find it: write "
        f"%%writefile task.py on the first line of its cell, its imports below, and give task.py:{name} as the type"
    )
