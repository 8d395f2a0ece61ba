"""An iterator that runs ahead of its consumer in a thread of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator
from types import TracebackType
from typing import Generic, Self, TypeVar

from orchestray.platform.data.retries import STOP
from orchestray.platform.process.pulse import PULSE

Item = TypeVar("Item")


class Prefetch(Generic[Item]):
    """An iterator over a generator, which runs in a background thread up to `depth` items ahead.

    It is a context manager: leaving it closes the generator and joins the thread, however much was consumed. An
    exception of the generator reaches the consumer after the items before it, unchanged and with its traceback.
    """

    def __init__(self, items: Generator[Item, None, None], depth: int) -> None:
        """
        Args:
            items: the generator.
            depth: number of items; 0: the consumer's thread runs it, item by item.
        """
        self._items = items
        self._depth = depth
        self._ready: deque[Item] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._closed = False
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        if not self._depth:
            item = next(self._items)
            PULSE.beats += 1
            PULSE.shares += 1
            return item
        if self._thread is None:
            self._start()
        with self._changed:
            while not self._ready and not self._ended and not self._closed:
                self._changed.wait()
            if self._ready and not self._closed:
                item = self._ready.popleft()
                self._changed.notify()
                PULSE.beats += 1
                PULSE.shares += 1
                return item
        self.close()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        raise StopIteration

    def close(self) -> None:
        """End the thread and wait for it; drop the items that are ready. May be called again."""
        self._stop.set()
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is None:
            self._items.close()
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def _start(self) -> None:
        if self._depth and self._thread is None and not self._closed:
            # A daemon, so that a consumer abandoned half-way does not keep the process alive.
            self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        STOP.set(self._stop)
        try:
            for item in self._items:
                if not self._hand_over(item):
                    break
            self._items.close()
        except BaseException as error:  # noqa: BLE001 - it is the consumer's to handle
            self._error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _hand_over(self, item: Item) -> bool:
        with self._changed:
            while len(self._ready) >= self._depth and not self._closed:
                self._changed.wait()
            if self._closed:
                return False
            self._ready.append(item)
            self._changed.notify()
            return True
