from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from orchestray.platform.run.recorder import Recorder
from support.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable


def test_no_line_is_lost_or_reordered_while_another_thread_drains() -> None:
    recorder = Recorder()
    drained: list[dict[str, Any]] = []

    def read() -> None:
        while not drained or drained[-1]["step"] < 20_000:
            drained.extend(recorder.drain(10.0))

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(1, 20_001):
        recorder.record({"step": step})
    reader.join(PATIENCE_S)
    assert [line["step"] for line in drained] == list(range(1, 20_001))


def test_a_waiting_drain_is_woken_by_a_line_and_by_close() -> None:
    recorder = Recorder()
    answers: list[list[dict[str, Any]]] = []
    wakes: list[Callable[[], None]] = [lambda: recorder.record({"step": 1}), recorder.close]
    for wake in wakes:
        reader = threading.Thread(target=lambda: answers.append(recorder.drain(600.0)))
        reader.start()
        wake()
        reader.join(PATIENCE_S)
        assert not reader.is_alive()
    assert answers == [[{"step": 1}], []]


def test_a_drain_without_lines_ends_at_its_timeout() -> None:
    assert Recorder().drain(0.0) == []


def test_the_interval_between_answers_never_outlasts_the_timeout() -> None:
    recorder = Recorder()
    recorder.drain(0.0)
    recorder.record({"step": 1})
    assert recorder.drain(0.01, min_interval_s=600.0) == [{"step": 1}]


def test_drained_lines_are_kept_up_to_the_limit_and_pending_ones_all() -> None:
    recorder = Recorder(kept_lines=3)
    for step in range(1, 6):
        recorder.record({"step": step})
    recorder.drain(0.0)
    recorder.record({"step": 6})
    assert [line["step"] for line in recorder.since(0)] == [3, 4, 5, 6]
    assert [line["step"] for line in recorder.since(4)] == [5, 6]


def test_going_back_forgets_the_later_lines_drained_or_not() -> None:
    recorder = Recorder()
    for step in (1, 2, 3):
        recorder.record({"step": step})
    recorder.drain(0.0)
    recorder.record({"step": 4})
    recorder.forget_after(2)
    assert [line["step"] for line in recorder.since(0)] == [1, 2]
    assert recorder.drain(0.0) == []


def test_after_close_what_is_left_is_drained() -> None:
    recorder = Recorder()
    recorder.record({"step": 1})
    recorder.close()
    assert recorder.drain(0.0) == [{"step": 1}]
    assert recorder.drain(600.0) == []
