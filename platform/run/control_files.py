"""Requests of other processes to the driver of a live run, passed as files in the run directory.

    .requests/<id>.json    requested, not seen yet; may still be withdrawn
    .requests/<id>.taken   the driver is working on it
    .requests/<id>.answer  the answer, until the requesting process has read it

Each file appears complete and is renamed in one step. So this works between any two processes that see the directory,
on one machine or on two. Requests are taken in the order in which they came.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestray.platform.errors import OrchestrayError, StorageError
from orchestray.platform.run.directory import RunPaths, is_live
from orchestray.platform.run.files import (
    dump_json,
    is_temporary,
    load_json,
    remove_tree,
    storage_errors,
    write_atomic,
)

_ASKED, _TAKEN, _ANSWER = ".json", ".taken", ".answer"
_LOOK_S = 0.1
"""Seconds between two looks at the directory: a file system does not report changes."""
_LOOK_FOR_LIFE_S = 1.0
_LOOK_FOR_REQUESTS_S = 0.3

Answer = Mapping[str, Any]


class NotAnsweredError(OrchestrayError):
    """Raised when the run ended, or the time was up, before the request was answered."""


@dataclass(frozen=True)
class Request:
    """A request to the driver."""

    id: str
    content: Mapping[str, Any]
    """JSON values from outside, not validated."""


class Asked:
    """A request as seen by the process that makes it."""

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        """Send a request to the run in the directory `path`.

        Raises:
            StorageError: the directory is not writable.
        """
        self._run = path
        self._id = f"{time.time_ns():020d}-{socket.gethostname()}-{os.getpid()}"
        self._directory = RunPaths(path).requests
        with storage_errors(f"write into the run directory {path}"):
            self._directory.mkdir(exist_ok=True)
        write_atomic(self._file(_ASKED), dump_json(content).encode())

    def wait(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the answer and return it.

        Raises:
            NotAnsweredError: the run ended before, or `timeout_s` have passed; a request that was not taken by then is
                withdrawn.
        """
        deadline_s = time.monotonic() + timeout_s
        life_s = time.monotonic() + _LOOK_FOR_LIFE_S
        while (answer := self._read()) is None:
            now_s = time.monotonic()
            if now_s > life_s:
                life_s = now_s + _LOOK_FOR_LIFE_S
                if self._is_over():
                    return self._last_words()
            if now_s > deadline_s:
                raise NotAnsweredError(self._too_late(timeout_s))
            time.sleep(_LOOK_S)
        return answer

    def _last_words(self) -> dict[str, Any]:
        if (answer := self._read()) is not None:  # written during the check that the run is over
            return answer
        self.withdraw()
        raise NotAnsweredError(f"Run '{self._run.name}' ended before it could answer.")

    def withdraw(self) -> bool:
        """Withdraw the request; return False if the driver is already working on it."""
        try:
            self._file(_ASKED).unlink()
        except FileNotFoundError:
            return False
        return True

    def _too_late(self, timeout_s: float) -> str:
        if self.withdraw():
            return (
                f"Run '{self._run.name}' did not look at the request within {timeout_s:g} s, and it was taken back: "
                "the run is still starting, or recovering, or busy with an earlier request. Ask again, or wait longer."
            )
        return (
            f"Run '{self._run.name}' has taken the request up, and is not done with it after {timeout_s:g} s. It goes "
            "on with it; `orchestray runs show` says what came of it."
        )

    def _is_over(self) -> bool:
        there = any(self._file(ending).exists() for ending in (_ASKED, _TAKEN, _ANSWER))
        return not there or not is_live(self._run)

    def _read(self) -> dict[str, Any] | None:
        path = self._file(_ANSWER)
        if not path.exists():
            return None
        answer = load_json(path)
        remove_tree(path)
        return dict(answer)

    def _file(self, ending: str) -> Path:
        return self._directory / f"{self._id}{ending}"


class Inbox:
    """The requests to one run as seen by its driver."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Open the inbox, and drop all requests to an earlier process.

        Args:
            path: the run directory.
            clock: returns monotonic seconds; the directory is checked a few times a second.
        """
        self._directory = RunPaths(path).requests
        self._clock = clock
        self._look_at_s = float("-inf")
        remove_tree(self._directory)

    def take(self) -> Request | None:
        """Take the oldest open request; return None if there is none, or if it is too early to check again."""
        if self._clock() < self._look_at_s:
            return None
        self._look_at_s = self._clock() + _LOOK_FOR_REQUESTS_S
        return next(self._taken(), None)

    def answer(self, request: Request, answer: Answer) -> None:
        """Write the answer to a request; it is lost if the disk refuses."""
        with contextlib.suppress(StorageError):
            write_atomic(self._file(request.id, _ANSWER), dump_json(answer).encode())
        remove_tree(self._file(request.id, _TAKEN))

    def close(self, answer: Answer) -> None:
        """Give all open requests this answer: the run has ended."""
        for request in self._taken():
            self.answer(request, answer)
        with contextlib.suppress(OSError):
            self._directory.rmdir()  # unless an answer has not been read yet

    def _taken(self) -> Iterator[Request]:
        try:
            names = sorted(entry.name for entry in self._directory.iterdir())
        except OSError:
            return
        for name in names:
            if is_temporary(name) or not name.endswith(_ASKED):
                continue
            id_ = name.removesuffix(_ASKED)
            taken = self._file(id_, _TAKEN)
            try:
                self._file(id_, _ASKED).rename(taken)
                content = load_json(taken)
            except (OSError, StorageError):
                continue  # withdrawn just now, or not a request
            if isinstance(content, dict):
                yield Request(id_, content)

    def _file(self, id_: str, ending: str) -> Path:
        return self._directory / f"{id_}{ending}"
