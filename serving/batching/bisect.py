"""Isolation of failing requests: a failed batch is run again in halves until the requests that fail are alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from orchestray.serving.batching.queue import Request

In = TypeVar("In")
Out = TypeVar("Out")


class Parts(Generic[In, Out]):
    """The parts of a failed batch that a runner still has to run, each as a batch of its own.

    If all parts failed, the function is broken and no request is to blame. Failed batches are then not split, which
    would take 2 n - 1 calls for n requests, until one was answered again.
    """

    def __init__(self) -> None:
        self._waiting: list[Sequence[Request[Any, Any]]] = []
        """Parts in reverse order: the next one to run is the last."""
        self._is_vain = self._has_answered = False

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def split(self, batch: Sequence[Request[In, Out]], *, is_part: bool) -> bool:
        """Split a failed batch, or a part of one, into halves that run next; return False if it is not run again."""
        left = [request for request in batch if not request.done()]
        if len(batch) == 1 or not left or (self._is_vain and not is_part):
            return False
        if not is_part:
            self._has_answered = False
        middle = len(left) // 2
        self._waiting += [part for part in (left[middle:], left[:middle]) if part]
        return True

    def next(self) -> Sequence[Request[In, Out]]:
        """Return the next part, without requests that are done; may be empty."""
        return [request for request in self._waiting.pop() if not request.done()]

    def answered(self) -> None:
        """Note that a batch, or a part of one, was answered."""
        self._has_answered, self._is_vain = True, False

    def failed_alone(self) -> None:
        """Note that a part failed and is not split any further."""
        self._is_vain = not self._waiting and not self._has_answered

    def take_all(self) -> list[Request[In, Out]]:
        """Remove and return all requests that are left, for another runner."""
        found = [request for part in reversed(self._waiting) for request in part if not request.done()]
        self._waiting.clear()
        return found
