from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from orchestray.platform.process.stopping import Asked, stop_on_signals

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def _own_handlers() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS)
def test_the_first_signal_asks_once_and_the_second_ends_at_once(first: int, second: int) -> None:
    asked: list[bool] = []
    said: list[str] = []

    number = Asked()

    def interrupted() -> None:
        with stop_on_signals(lambda: asked.append(True), said.append, meanwhile="tidying up", asked=number):
            signal.raise_signal(first)
            assert asked == [True]
            signal.raise_signal(second)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert asked == [True]
    assert number.number == second
    assert said == ["stopping: tidying up (once more to stop at once)"]
    assert [signal.getsignal(number) for number in SIGNALS] == [signal.SIG_IGN] * 2


def test_in_another_thread_signals_stay_as_they_are() -> None:
    found: list[object] = []

    def work() -> None:
        with stop_on_signals(lambda: None, found.append, meanwhile="tidying up"):
            found.extend(signal.getsignal(number) for number in SIGNALS)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.SIG_IGN] * 2
