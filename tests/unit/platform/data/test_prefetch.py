"""A generator in a thread of its own: bounded, in order, honest about errors, and gone when it is left."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Generator

import pytest

from orchestray.platform.data.prefetch import Prefetch
from support.patience import PATIENCE_S


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


class Counting:
    """A counter that shows how far it has come and whether it was closed."""

    def __init__(self, stop: int, fail_at: int = -1) -> None:
        self.made = 0
        self.made_one = threading.Semaphore(0)
        self.closed = threading.Event()
        self._stop, self._fail_at = stop, fail_at

    def items(self) -> Generator[int, None, None]:
        try:
            for number in range(self._stop):
                if number == self._fail_at:
                    raise ValueError(f"number {number}")
                self.made += 1
                self.made_one.release()
                yield number
        finally:
            self.closed.set()


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_items_come_in_order_and_the_thread_is_gone_afterwards(depth: int) -> None:
    counting = Counting(50)
    with Prefetch(counting.items(), depth) as items:
        assert list(items) == list(range(50))
        assert prefetch_threads() == []
    assert counting.closed.is_set()


@pytest.mark.parametrize("depth", [1, 3])
def test_it_runs_ahead_by_its_depth_and_no_further(depth: int) -> None:
    counting = Counting(50)
    with Prefetch(counting.items(), depth) as items:
        for taken in range(1, 50 - depth):
            next(items)
            for _ in range(1 if taken > 1 else depth + 1):  # it does run ahead: these come without another being taken
                assert counting.made_one.acquire(timeout=PATIENCE_S)
            assert taken + depth <= counting.made <= taken + depth + 1  # one more is in the generator's hand


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_leaving_early_closes_the_generator_and_joins_the_thread(taken: int) -> None:
    counting = Counting(1000)
    with Prefetch(counting.items(), 2) as items:
        for _ in range(taken):
            next(items)
    assert counting.closed.is_set()
    assert prefetch_threads() == []
    assert list(items) == []


def test_a_consumer_that_raises_leaves_no_thread_behind() -> None:
    counting = Counting(1000)
    with pytest.raises(ZeroDivisionError), Prefetch(counting.items(), 2) as items:
        1 / next(items)
    assert counting.closed.is_set()
    assert prefetch_threads() == []


def test_an_error_comes_after_the_items_before_it_with_its_own_traceback() -> None:
    counting = Counting(10, fail_at=3)
    seen: list[int] = []
    with pytest.raises(ValueError, match="number 3") as caught, Prefetch(counting.items(), 8) as items:
        seen.extend(iter(items.__next__, None))
    assert seen == [0, 1, 2]
    assert any(frame.name == "items" for frame in traceback.extract_tb(caught.value.__traceback__))
    assert prefetch_threads() == []


def test_it_works_without_a_context_when_it_is_used_up() -> None:
    items = Prefetch(Counting(4).items(), 2)
    assert list(items) == [0, 1, 2, 3]
    assert prefetch_threads() == []


def test_closing_twice_or_before_the_start_is_harmless() -> None:
    items = Prefetch(Counting(4).items(), 2)
    items.close()
    items.close()
    assert list(items) == []


def test_without_depth_the_consumer_makes_each_item_in_its_own_thread_when_it_asks_for_it() -> None:
    counting = Counting(3)
    with Prefetch(counting.items(), 0) as items:
        for asked in range(1, 4):
            assert next(items) == counting.made - 1
            assert counting.made == asked
            assert prefetch_threads() == []
        assert list(items) == []
    assert counting.closed.is_set()


def test_without_depth_leaving_early_closes_the_generator_and_an_error_comes_in_its_place() -> None:
    counting = Counting(10, fail_at=1)
    with pytest.raises(ValueError, match="number 1"), Prefetch(counting.items(), 0) as items:
        list(items)
    counting = Counting(10)
    with Prefetch(counting.items(), 0) as items:
        next(items)
    assert counting.closed.is_set()
    assert list(items) == []
