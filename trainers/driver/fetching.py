"""Lines of a run's book that are fetched from another process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestray.trainers.driver.story import Book

ANSWER_TIMEOUT_S = 15.0
"""How long a driver waits for a process that may be frozen."""


class Inquiry:
    """Asks a process for its lines, and writes them down: one question at a time.

    A process hands over each line once, events among them that no other has. So a question that is not answered in time
    stays open, and its answer is taken before anything else is asked: no line of a slow process is lost, nor comes
    before an older one. Of a process that is dead Ray says so: then the copies of others tell the metric lines, which
    all keep, and a checkpoint carries those above `Story.written_step`.
    """

    def __init__(self, book: Book) -> None:
        self._book = book
        self._asked: Any = None

    def ask(self, send: Callable[[], Any]) -> Any:
        """The Ray reference of the answer to come.

        Args:
            send: asks; not called while an earlier question is open.
        """
        if self._asked is None:
            self._asked = send()
        return self._asked

    def take(self) -> bool:
        """Write down the answer to the open question; returns whether there was anything. Waits for it, for a while.

        A process that has died tells nothing: its death shows in its own place.
        """
        if self._asked is None:
            return False
        try:
            lines = ray.get(self._asked, timeout=ANSWER_TIMEOUT_S)
        except GetTimeoutError:
            return False
        except RayError:
            lines = None
        self._asked = None
        if not isinstance(lines, list):
            return False
        self._book.record(lines)
        return bool(lines)


def copies_of(references: Sequence[Any]) -> list[dict[str, Any]]:
    """The copies of lines that processes were asked for, of those that answer: each has them all."""
    ready, _ = ray.wait(list(references), num_returns=len(references), timeout=ANSWER_TIMEOUT_S)
    copies: list[dict[str, Any]] = []
    for reference in ready:
        try:
            lines = ray.get(reference, timeout=ANSWER_TIMEOUT_S)
        except RayError:  # dead; or, as of a time that is up, its machine is gone with the answer
            continue
        if isinstance(lines, list):
            copies += lines
    return copies
