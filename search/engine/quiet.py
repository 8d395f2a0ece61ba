"""Tune says nothing while a search runs: it is told of in our own words."""

from __future__ import annotations

import logging
import threading
from typing import Self


class Quiet:
    """While anybody is within it these loggers say nothing; a context manager that many threads may be in at once.

    Levels belong to the whole process: whoever comes second would find those that the first has set, and put them back
    for good.
    """

    def __init__(self, *names: str) -> None:
        """Args:
        names: of loggers; those below them follow.
        """
        self._loggers = [logging.getLogger(name) for name in names]
        self._levels: list[int] = []
        self._lock, self._num_within = threading.Lock(), 0

    def __enter__(self) -> Self:
        with self._lock:
            if not self._num_within:
                self._levels = [logger.level for logger in self._loggers]
                for logger in self._loggers:
                    logger.setLevel(logging.CRITICAL)
            self._num_within += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_within -= 1
            if not self._num_within:
                for logger, level in zip(self._loggers, self._levels, strict=True):
                    logger.setLevel(level)


TUNE = Quiet("ray.tune", "ray.train", "ray.air")
"""Of all searches of this process."""
