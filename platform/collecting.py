"""Python's collector of garbage in cycles, kept from work that is in vain."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def pause() -> Iterator[None]:
    """Collect nothing while large modules are imported: what they make stays.

    Importing torch and the loop makes some 400,000 objects, and the collector looks through all of them again and
    again: 0.4 s of the 2.8 s of CPU time that a worker's imports take, measured. What was made meanwhile is looked
    through at the next collection of its generation, once.
    """
    was_enabled = gc.isenabled()  # a pause within a pause ends with the outer one
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
