"""A thread for a model's calls: they are run in order, and one that hangs keeps nobody, not even the process."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import CancelledError
from functools import partial

import pytest

from orchestray.serving.runtime.work_thread import WorkThread
from support.patience import PATIENCE_S

_HANGS = """
import threading
from orchestray.serving.runtime.work_thread import WorkThread

begun = threading.Event()
thread = WorkThread("hangs", lambda: None)
thread.submit(begun.set)
thread.submit(threading.Event().wait)
begun.wait()
thread.shutdown(cancel_futures={cancel})
"""


def nothing() -> None:
    pass


def test_calls_are_run_in_order_by_one_thread_which_begins_with_what_it_was_told() -> None:
    ran: list[tuple[str, int]] = []

    def run(name: str) -> int:
        ran.append((name, threading.get_ident()))
        return len(ran)

    thread = WorkThread("t", lambda: ran.append(("begin", threading.get_ident())))
    futures = [thread.submit(run, str(number)) for number in range(3)]
    assert [future.result(60) for future in futures] == [2, 3, 4]
    assert [name for name, _ in ran] == ["begin", "0", "1", "2"]
    assert len({ident for _, ident in ran}) == 1
    thread.shutdown(wait=True)
    with pytest.raises(RuntimeError, match="was shut down"):
        thread.submit(nothing)


def test_what_a_call_raises_is_its_own_and_what_the_beginning_raises_is_everyones() -> None:
    thread = WorkThread("t", nothing)
    with pytest.raises(ZeroDivisionError):
        thread.submit(lambda: 1 // 0).result(60)
    assert thread.submit(lambda: 5).result(60) == 5
    thread.shutdown(wait=True)
    broken = WorkThread("t", lambda: {}["none"])
    for _ in range(2):
        with pytest.raises(KeyError):
            broken.submit(nothing).result(60)
    broken.shutdown(wait=True)


def test_after_a_shutdown_what_has_not_begun_is_run_or_cancelled() -> None:
    for cancel in (False, True):
        go, begun = threading.Event(), threading.Event()
        thread = WorkThread("t", nothing)
        thread.submit(begun.set)
        first, second = thread.submit(go.wait, 60), thread.submit(lambda: 7)
        assert begun.wait(60)
        thread.submit(nothing)
        while not first.running():
            pass
        thread.shutdown(cancel_futures=cancel)
        go.set()
        thread.shutdown(wait=True)
        assert first.result(60) is True
        if cancel:
            with pytest.raises(CancelledError):
                second.result(60)
        else:
            assert second.result(60) == 7


@pytest.mark.parametrize("cancel", [False, True])
def test_a_call_that_never_returns_does_not_keep_the_process(cancel: bool) -> None:
    assert (
        subprocess.run([sys.executable, "-c", _HANGS.format(cancel=cancel)], timeout=PATIENCE_S, check=False).returncode
        == 0
    )


class Held:
    """An object that a call works with."""


def test_once_a_call_is_answered_the_thread_keeps_neither_it_nor_what_it_began_with() -> None:
    beginning, held = Held(), Held()
    kept = [weakref.ref(beginning), weakref.ref(held)]
    thread = WorkThread("t", partial(id, beginning))
    thread.submit(nothing).result(PATIENCE_S)
    go, seen = threading.Event(), list[bool]()
    future = thread.submit(lambda _: go.wait(PATIENCE_S), held)
    future.add_done_callback(lambda _: seen.append(not any(each() for each in kept)))  # called as it is answered
    del beginning, held
    go.set()
    assert future.result(PATIENCE_S)
    thread.shutdown(wait=True)
    assert seen == [True]


def test_an_error_keeps_nothing_of_its_call_once_nobody_has_it() -> None:
    thread = WorkThread("t", nothing)

    def fail(held: Held) -> None:
        raise ValueError(str(held))

    held = Held()
    kept = weakref.ref(held)
    gc.disable()
    try:
        future = thread.submit(fail, held)
        assert isinstance(future.exception(PATIENCE_S), ValueError)
        thread.submit(nothing).result(PATIENCE_S)  # by then the thread has let go of it
        del held, future
        assert kept() is None
    finally:
        gc.enable()
        thread.shutdown(wait=True)


def test_several_threads_run_as_many_calls_at_a_time() -> None:
    threads, barrier = WorkThread("t", num_threads=3), threading.Barrier(3)
    futures = [threads.submit(barrier.wait, PATIENCE_S) for _ in range(3)]
    assert sorted(future.result(PATIENCE_S) for future in futures) == [0, 1, 2]
    threads.shutdown(wait=True)
