"""The interface of a tracker, and the form in which it gets what a run has recorded."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

_PLACES = frozenset({"step", "time_s", "split"})
"""Keys of a metric line that say where it belongs."""


class Tracker(Protocol):
    """A receiver of a run's metrics. All calls come from one thread, which has nothing else to do."""

    def start(self, config: dict[str, Any], name: str, resumed: bool) -> int | None:
        """Begin, or go on with, the record of a run.

        Args:
            config: the run's config, with every default.
            name: name of the run.
            resumed: True if the run goes on: lines of earlier steps are there.

        Returns:
            The last step whose lines the tracker has, if it can tell: only later ones follow.
        """
        ...

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record numbers of a step, such as `train/loss` or `validation/accuracy`; steps come in order."""
        ...

    def finish(self, status: str) -> None:
        """End the record; the status is `succeeded`, `failed` or `interrupted`."""
        ...


METHODS: Mapping[str, int] = {"start": 3, "log": 2, "finish": 1}
"""Methods of a tracker, and the number of their arguments."""


def numbers_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a metric line by split and key; nan for JSON's null."""
    split = str(line.get("split", "train"))
    return {
        f"{split}/{key}": math.nan if value is None else float(value)
        for key, value in line.items()
        if key not in _PLACES and (value is None or is_number(value))
    }


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value that is not a non-empty mapping, with its dotted key; lists stay whole."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def identity_of(directory: Path) -> str:
    """Return an id of a run, in 32 characters: the same when it goes on, another for a later run of that name."""
    began = (directory / ".lock").stat().st_mtime_ns  # the lock file is never written after it was made
    return hashlib.sha256(f"{directory}\n{began}".encode()).hexdigest()[:32]
