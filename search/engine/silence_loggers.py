"""A silencer of Tune's loggers: a search reports its progress itself."""

from __future__ import annotations

import logging
import threading
from typing import Self


class Quiet:
    """A context manager that silences loggers while any thread is inside it.

    Log levels belong to the whole process. A second silencer would find the levels set by the first, and restore those
    for good.
    """

    def __init__(self, *names: str) -> None:
        """
        Args:
            names: names of loggers; those below them are silenced, too.
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
"""Silencer shared by all searches of this process."""
