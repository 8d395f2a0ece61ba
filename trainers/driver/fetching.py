"""Lines of a run's book that are fetched from another process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

if TYPE_CHECKING:
    from orchestray.trainers.driver.story import Book


def write_down(reference: Any, book: Book) -> bool:
    """Write down what a process was asked for; returns whether there was anything. Waits for it.

    A process that has died tells nothing: its death shows in its own place.
    """
    try:
        lines = ray.get(reference)
    except RayError:
        return False
    if not isinstance(lines, list):
        return False
    book.record(lines)
    return bool(lines)
