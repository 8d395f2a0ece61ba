"""A pause of the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from importlib import import_module

import pytest

from orchestray.platform import collecting


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


def test_nothing_is_collected_within_a_pause_and_all_is_as_before_after_it() -> None:
    gc.enable()
    num_lists = 10 * gc.get_threshold()[0]
    with collecting.pause():
        before = gc.get_stats()
        kept = [[number] for number in range(num_lists)]
        assert (gc.get_stats(), len(kept)) == (before, num_lists)
    assert gc.isenabled()


def test_what_fails_within_a_pause_ends_it() -> None:
    gc.enable()
    with pytest.raises(ModuleNotFoundError), collecting.pause():
        import_module("orchestray.nowhere")
    assert gc.isenabled()


def test_a_pause_within_a_pause_does_not_end_it() -> None:
    gc.enable()
    with collecting.pause():
        with collecting.pause():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_who_has_switched_collections_off_finds_them_off() -> None:
    gc.disable()
    with collecting.pause():
        pass
    assert not gc.isenabled()
