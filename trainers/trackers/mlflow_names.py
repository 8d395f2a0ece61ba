"""The names and values that MLflow accepts; the rules are those of `mlflow/utils/validation.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from orchestray.trainers.trackers.base import flatten

T = TypeVar("T")

_FORBIDDEN = re.compile(r"[^0-9A-Za-z_.\- ]")
_MAX_NAME, _MAX_PARAM = 250, 6000
"""Largest numbers of characters that mlflow accepts in a name or a parameter."""


def params_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of a config, dotted like on the command line; values other than strings are JSON."""
    texts = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in flatten(config))
    return {name: text[:_MAX_PARAM] for name, text in named(texts)}


def clean(name: str) -> str:
    """Return the name with only characters that MLflow allows.

    A slash would create a directory where another name may need a file.
    """
    cleaned = _FORBIDDEN.sub("_", name)[: _MAX_NAME - 20]
    return cleaned if cleaned.strip(".") else f"_{cleaned}"


def named(values: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """Yield each value with its clean name, numbered if two names collide."""
    taken: set[str] = set()
    for name, value in values:
        cleaned, number = clean(name), 2
        unique = cleaned
        while unique.casefold() in taken:
            unique, number = f"{cleaned}_{number}", number + 1
        taken.add(unique.casefold())
        yield unique, value
