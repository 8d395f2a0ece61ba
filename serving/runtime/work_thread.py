"""A thread, or several, that runs calls in their order, and that need not be waited for."""

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
    """An executor with one thread, or several, which start with the first calls and do not delay the process's end.

    The thread of a `ThreadPoolExecutor` is joined as the interpreter exits, even after `shutdown(wait=False)`. A model
    that hangs would keep the process alive for ever.

    Args:
        name: name of the thread.
        begin: called first in the thread; if it raises, so does every call.
        num_threads: largest number of calls at a time.
    """

    def __init__(self, name: str, begin: Callable[[], None] = lambda: None, *, num_threads: int = 1) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._unstarted = [
            threading.Thread(target=self._work, args=([begin],), name=name, daemon=True) for _ in range(num_threads)
        ]
        self._is_shut = False

    def submit(self, fn: Callable[..., Found], /, *args: Any, **kwargs: Any) -> Future[Found]:
        """Have the thread run a call, after those submitted before.

        Raises:
            RuntimeError: the executor was shut down.
        """
        future: Future[Found] = Future()
        with self._lock:
            if self._is_shut:
                raise RuntimeError("the thread was shut down and runs nothing more")
            if self._unstarted:
                self._threads.append(self._unstarted.pop())
                self._threads[-1].start()
            self._calls.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """Accept no more calls; earlier ones are run, or cancelled unless they have begun.

        Args:
            wait: True to return only when the thread has ended.
            cancel_futures: True to cancel calls that have not begun.
        """
        with self._lock:
            self._is_shut = True
            self._unstarted.clear()
            while cancel_futures:
                try:
                    call = self._calls.get_nowait()
                except Empty:
                    break
                if call is not None:
                    call[0].cancel()
            for _ in self._threads:
                self._calls.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _work(self, begin: list[Callable[[], None]]) -> None:
        """Run calls until there are no more.

        Whoever waits for an answer, or has shut the executor down, may take what the calls used for gone: nothing here
        keeps it.

        Args:
            begin: what to call first, which is taken out.
        """
        failed: BaseException | None = None
        try:
            begin.pop()()
        except BaseException as error:  # noqa: BLE001 - the user's error, which every call then raises
            failed = error
        while (call := self._calls.get()) is not None:
            future, function = call
            del call
            if not future.set_running_or_notify_cancel():
                del future, function
                continue
            try:
                answer = function() if failed is None else None
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised by the future
                del function  # the error references this frame
                future.set_exception(error)
            else:
                del function
                if failed is None:
                    future.set_result(answer)
                else:
                    future.set_exception(failed)
                del answer
            del future
