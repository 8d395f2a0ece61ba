"""A pause of the garbage collector, and what it leaves out."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from importlib import import_module

import pytest

from orchestray.platform.process import gc_control


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


def test_nothing_is_collected_within_a_pause_and_all_is_as_before_after_it() -> None:
    gc.enable()
    num_lists = 10 * gc.get_threshold()[0]
    with gc_control.pause():
        before = gc.get_stats()
        kept = [[number] for number in range(num_lists)]
        assert (gc.get_stats(), len(kept)) == (before, num_lists)
    assert gc.isenabled()


def test_what_fails_within_a_pause_ends_it() -> None:
    gc.enable()
    with pytest.raises(ModuleNotFoundError), gc_control.pause():
        import_module("orchestray.nowhere")
    assert gc.isenabled()


def test_a_pause_within_a_pause_does_not_end_it() -> None:
    gc.enable()
    with gc_control.pause():
        with gc_control.pause():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_pauses_of_two_threads_end_with_the_last_one_whichever_begins_first() -> None:
    gc.enable()
    first, second = gc_control.pause(), gc_control.pause()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_who_has_switched_collections_off_finds_them_off() -> None:
    gc.disable()
    with gc_control.pause():
        pass
    assert not gc.isenabled()


class Node:
    """An object that can be in a cycle, and be looked at from outside."""

    def __init__(self) -> None:
        self.itself = self


def test_what_is_there_when_it_settles_is_left_out_until_it_settles_again_or_ends() -> None:
    with gc_control.leaving_out() as settle:
        kept = Node()
        settle()
        watched = weakref.ref(kept)
        del kept
        gc.collect()
        assert watched() is not None  # looked through no more
        settle()
        assert watched() is None
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_what_was_left_out_before_is_looked_through_from_the_second_time_on() -> None:
    kept = Node()
    gc.freeze()
    watched = weakref.ref(kept)
    del kept
    with gc_control.leaving_out() as settle:
        settle()
        assert watched() is not None
        settle()
        assert watched() is None


def test_what_comes_after_it_settled_is_collected() -> None:
    with gc_control.leaving_out() as settle:
        settle()
        watched = weakref.ref(Node())
        gc.collect()
        assert watched() is None


def test_young_objects_are_looked_through_seldom_once_it_has_settled_and_as_before_at_the_end() -> None:
    before = gc.get_threshold()
    with gc_control.leaving_out() as settle:
        assert gc.get_threshold() == before
        settle()
        settle()
        assert gc.get_threshold()[0] > 10 * before[0]
        assert gc.get_threshold()[1:] == before[1:]
    assert gc.get_threshold() == before
    settle()  # late, as an update does that ends after its endpoint
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_of_two_blocks_the_last_to_end_leaves_all_as_it_was_before_the_first() -> None:
    before = gc.get_threshold()
    first, second = gc_control.leaving_out(), gc_control.leaving_out()
    settle_first, settle_second = first.__enter__(), second.__enter__()
    settle_first()
    settle_second()
    first.__exit__(None, None, None)
    assert gc.get_threshold() != before
    assert gc.get_freeze_count() > 0
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_who_wants_no_young_objects_looked_through_is_left_that() -> None:
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with gc_control.leaving_out() as settle:
            settle()
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
