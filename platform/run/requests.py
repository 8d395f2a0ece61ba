"""How somebody else asks something of the driver of a live run: by a file in the run directory.

    .requests/<id>.json    asked, and not seen yet; may still be taken back
    .requests/<id>.taken   the driver is at it
    .requests/<id>.answer  what came of it, until whoever asked has read it

Each file appears whole and changes its name in one step, so it works between any two processes that see the directory,
of one machine or of two. Requests are taken in the order in which they came.
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
"""A file system tells nobody of a change: one has to look."""
_LOOK_FOR_LIFE_S = 1.0
_LOOK_FOR_REQUESTS_S = 0.3

Answer = Mapping[str, Any]


class NotAnsweredError(OrchestrayError):
    """The run ended, or time was up, before the request was answered."""


@dataclass(frozen=True)
class Request:
    """What is asked."""

    id: str
    content: Mapping[str, Any]
    """JSON values, as they came from outside."""


class Asked:
    """A request, as whoever asked sees it."""

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        """Ask it of the run in the directory `path`.

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
        """The answer, once there is one.

        Raises:
            NotAnsweredError: the run ended before, or `timeout_s` have passed; a request that was not taken by then is
                taken back.
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
        if (answer := self._read()) is not None:  # it was written while it was looked whether the run is over
            return answer
        self.withdraw()
        raise NotAnsweredError(f"Run '{self._run.name}' ended before it could answer.")

    def withdraw(self) -> bool:
        """Take it back; returns False if the driver is at it already."""
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
    """The requests to one run, as its driver sees them."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Whatever was asked of an earlier process is forgotten.

        Args:
            path: the run directory.
            clock: seconds that only rise; the directory is looked at a few times a second.
        """
        self._directory = RunPaths(path).requests
        self._clock = clock
        self._look_at_s = float("-inf")
        remove_tree(self._directory)

    def take(self) -> Request | None:
        """The oldest request nobody has taken; None if there is none, or it is not yet time to look again."""
        if self._clock() < self._look_at_s:
            return None
        self._look_at_s = self._clock() + _LOOK_FOR_REQUESTS_S
        return next(self._taken(), None)

    def answer(self, request: Request, answer: Answer) -> None:
        """Say what came of a request; where the disk refuses, nobody learns of it."""
        with contextlib.suppress(StorageError):
            write_atomic(self._file(request.id, _ANSWER), dump_json(answer).encode())
        remove_tree(self._file(request.id, _TAKEN))

    def close(self, answer: Answer) -> None:
        """Answer whatever is still asked alike: the run has ended."""
        for request in self._taken():
            self.answer(request, answer)
        with contextlib.suppress(OSError):
            self._directory.rmdir()  # unless somebody has not read an answer yet

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
                continue  # taken back just now, or nothing that was asked this way
            if isinstance(content, dict):
                yield Request(id_, content)

    def _file(self, id_: str, ending: str) -> Path:
        return self._directory / f"{id_}{ending}"
