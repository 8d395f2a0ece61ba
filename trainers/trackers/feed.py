"""The feeding of trackers from a run's `metrics.jsonl`, each in a thread of its own, which nothing waits for.

The file is the queue: a slow tracker holds up no step and takes no memory. When training goes back to a checkpoint, the
file is rewritten; steps that a tracker has are then not sent again.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from orchestray.platform.run.files import load_json, write_atomic
from orchestray.trainers.trackers.base import numbers_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestray.trainers.trackers.base import Tracker

_LOOK_S = 1.0
_FINISH_S = 30.0
"""Longest wait for a tracker at the end."""
_WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Waits after failures in a row; after one more the tracker is given up."""
_SAVE_S = 1.0
_LONGEST_TEXT = 300

Place = tuple[int, bool]
"""A step, and True for its validation: the order of the lines."""


class Feed:
    """A thread that gives one tracker the lines of a run."""

    def __init__(
        self,
        name: str,
        make: Callable[[Path], Tracker],
        directory: Path,
        warn: Callable[[str], None],
        *,
        waits_s: Sequence[float] = _WAITS_S,
    ) -> None:
        """
        Args:
            name: name of the tracker, for warnings.
            make: makes the tracker, in the thread.
            directory: directory of the run.
            warn: shows a warning; may be called from any thread.
            waits_s: waits after failures in a row.
        """
        self._name, self._make, self._warn, self._waits_s = name, make, warn, waits_s
        self._directory = directory
        self._tracker: Any = None
        self._metrics = directory / "metrics.jsonl"
        self._state = directory / "trackers" / f"{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-')}.json"
        self._last: Place = (0, False)
        """Place of the last line that the tracker has."""
        self._saved, self._saved_s = self._last, 0.0
        self._ending = threading.Event()
        self._status = ""
        self._file: IO[bytes] | None = None
        self._thread: threading.Thread | None = None

    def start(self, config: dict[str, Any], name: str, *, resumed: bool) -> None:
        """Start the thread; see `Tracker.start`."""
        self._thread = threading.Thread(
            target=self._work, args=(config, name, resumed), name=f"tracker-{self._name}", daemon=True
        )
        self._thread.start()

    def finish(self, status: str, timeout_s: float = _FINISH_S) -> None:
        """Give the tracker the rest of the lines, and end it; give up after `timeout_s`."""
        if self._thread is None:
            return
        self._status = status
        self._ending.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._warn(
                f"tracker {self._name}: was not ready {timeout_s:g} s after the end of the run; its end is missing"
            )

    def _work(self, config: dict[str, Any], name: str, resumed: bool) -> None:
        try:
            if resumed and self._state.exists():
                step, is_validation = load_json(self._state)["last"]
                self._last = self._saved = int(step), bool(is_validation)
            known = self._tried(self._begin, config, name, resumed)
            if known is not None:
                self._last = max(self._last, (int(known), False))  # it may lack the validation
            is_over = False
            while not is_over:
                is_over = self._ending.wait(_LOOK_S)
                self._hand_over()
            self._tried(self._tracker.finish, self._status)
        except Exception as error:  # noqa: BLE001 - nothing of a tracker may end the run
            self._warn(f"tracker {self._name}: {_text(error)}; the run goes on without it")
        finally:
            if self._file is not None:
                self._file.close()

    def _begin(self, config: dict[str, Any], name: str, resumed: bool) -> int | None:
        self._tracker = self._tracker or self._make(self._directory)
        known: int | None = self._tracker.start(config, name, resumed)
        return known

    def _hand_over(self) -> None:
        """Give the tracker what is new."""
        try:
            for place, numbers in self._news():
                self._tried(self._tracker.log, numbers, place[0])
                self._last = place
                self._save(_SAVE_S)
        finally:
            self._save(0.0)

    def _tried(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call the tracker; after a failure wait and try again. Raise the failure after many, or at the end.

        Raises:
            Exception: whatever the tracker raises.
        """
        for count, wait_s in enumerate(self._waits_s):
            try:
                return call(*arguments)
            except Exception as error:
                if self._ending.is_set() and count:  # the run has ended: nobody waits for long
                    raise
                if not count:
                    self._warn(f"tracker {self._name}: {_text(error)}; it is tried again")
            self._ending.wait(wait_s)
        return call(*arguments)

    def _news(self) -> Iterator[tuple[Place, dict[str, float]]]:
        """Yield the lines of the file that the tracker lacks, in order."""
        while True:
            for raw in self._lines():
                line = json.loads(raw)
                place = int(line["step"]), "split" in line
                if place > self._last and (numbers := numbers_of(line)):
                    yield place, numbers
            if not self._is_rewritten():
                return

    def _lines(self) -> Iterator[bytes]:
        """Yield the complete lines from where the last call ended."""
        if self._file is None:
            try:
                self._file = self._metrics.open("rb")
            except FileNotFoundError:
                return
        while True:
            begin = self._file.tell()
            raw = self._file.readline()
            if not raw.endswith(b"\n"):
                self._file.seek(begin)
                return
            yield raw

    def _is_rewritten(self) -> bool:
        """Return True if there is a new file, which is then read from its beginning."""
        try:
            now = self._metrics.stat().st_ino
        except FileNotFoundError:
            return False
        if self._file is None or os.fstat(self._file.fileno()).st_ino == now:
            return False
        self._file.close()
        self._file = None
        return True

    def _save(self, every_s: float) -> None:
        """Write down how far the tracker is, unless that was done less than `every_s` seconds ago."""
        now_s = time.monotonic()
        if self._last != self._saved and now_s - self._saved_s >= every_s:
            self._state.parent.mkdir(exist_ok=True)
            write_atomic(self._state, json.dumps({"last": self._last}).encode())
            self._saved, self._saved_s = self._last, now_s


class Feeds:
    """The feeds of a run's trackers."""

    def __init__(
        self, makers: Sequence[tuple[str, Callable[[Path], Tracker]]], directory: Path, warn: Callable[[str], None]
    ) -> None:
        """
        Args:
            makers: name of each tracker, and the function that makes it.
            directory: directory of the run.
            warn: shows a warning; may be called from any thread.
        """
        self._feeds = [Feed(name, make, directory, warn) for name, make in makers]

    def start(self, config: Mapping[str, Any], name: str, *, resumed: bool) -> None:
        """Start all; see `Tracker.start`."""
        for feed in self._feeds:
            feed.start(dict(config), name, resumed=resumed)

    def finish(self, status: str) -> None:
        """End all, and wait for a while until they have the last lines."""
        for feed in self._feeds:
            feed.finish(status)


def _text(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["it failed"]
    return f"{type(error).__name__}: {lines[0][:_LONGEST_TEXT]}"
