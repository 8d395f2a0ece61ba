"""A thread that runs what it is given, one call after the other, and that nobody need wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

Found = TypeVar("Found")

_Call = tuple[Future[Any], Callable[[], Any]]


class WorkThread(Executor):
    """An executor of one thread, which starts with the first call, and which the end of the process does not wait for.

    That of a `ThreadPoolExecutor` is joined as the interpreter exits, even after `shutdown(wait=False)`: a model that
    hangs would keep the process for ever.

    Args:
        name: of the thread.
        begin: is called first in the thread; where it raises, so does every call.
    """

    def __init__(self, name: str, begin: Callable[[], None]) -> None:
        self._begin = begin
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._is_shut = False

    def submit(self, fn: Callable[..., Found], /, *args: Any, **kwargs: Any) -> Future[Found]:
        """Have the thread call it, after what it was given before.

        Raises:
            RuntimeError: it was shut down.
        """
        future: Future[Found] = Future()
        with self._lock:
            if self._is_shut:
                raise RuntimeError("the thread was shut down and runs nothing more")
            if self._thread.ident is None:
                self._thread.start()
            self._calls.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """Run nothing that comes now; what was given before is run, or cancelled unless it has begun.

        Args:
            wait: return when the thread has ended.
            cancel_futures: cancel what has not begun.
        """
        with self._lock:
            self._is_shut = True
            while cancel_futures:
                try:
                    call = self._calls.get_nowait()
                except Empty:
                    break
                if call is not None:
                    call[0].cancel()
            self._calls.put(None)
        if wait and self._thread.ident is not None:
            self._thread.join()

    def _work(self) -> None:
        failed: BaseException | None = None
        try:
            self._begin()
        except BaseException as error:  # noqa: BLE001 - the user's; told to who calls
            failed = error
        while (call := self._calls.get()) is not None:
            _answer(*call, failed)
            del call  # or what was asked last would be kept while nothing is


def _answer(future: Future[Any], function: Callable[[], Any], failed: BaseException | None) -> None:
    if not future.set_running_or_notify_cancel():
        return
    if failed is not None:
        future.set_exception(failed)
        return
    try:
        answer = function()
    except BaseException as error:  # noqa: BLE001 - whatever it is, who asked is told
        future.set_exception(error)
        del future, function  # the error holds this frame: it would hold itself, and what it was raised for
    else:
        future.set_result(answer)
