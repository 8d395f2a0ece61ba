"""Text comes in whole characters, and ends before a stop text however that is cut."""

from __future__ import annotations

import random

import pytest

from orchestray.serving.generation.text import TextStream


def streamed(data: bytes, stops: tuple[str, ...], sizes: list[int]) -> tuple[str, bool]:
    stream, pieces, place = TextStream(stops), [], 0
    for size in sizes:
        if stream.stopped or place >= len(data):
            break
        pieces.append(stream.feed(data[place : place + size]))
        place += size
    if not stream.stopped:
        pieces += [stream.feed(data[place:]), stream.finish()]
    return "".join(pieces), stream.stopped


@pytest.mark.parametrize("seed", range(20))
def test_a_streamed_text_is_the_whole_one_up_to_the_first_stop(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("ab\nü→") for _ in range(60))
    stops = tuple("".join(rng.choice("ab\nü") for _ in range(rng.randrange(2, 5))) for _ in range(2))
    found = min((place for stop in stops if (place := text.find(stop)) >= 0), default=-1)
    # Byte by byte there is no doubt which stop comes first; so it is cut for the first that is whole.
    answer, stopped = streamed(text.encode(), stops, [1] * 1000)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert stopped == bool(ends)
    if found < 0:
        assert answer == text
    else:
        whole = [stop for stop in stops if stop in text and text.find(stop) + len(stop) == min(ends)]
        assert answer == text[: min(text.find(stop) for stop in whole)]


def test_what_may_become_a_stop_text_is_held_back_and_released_when_it_does_not() -> None:
    stream = TextStream(("END",))
    assert [stream.feed(piece) for piece in (b"a", b"E", b"N", b"x", b"EN")] == ["a", "", "", "ENx", ""]
    assert stream.finish() == "EN"


def test_a_character_of_several_bytes_comes_whole_and_a_broken_one_is_replaced() -> None:
    stream = TextStream()
    assert [stream.feed(bytes((byte,))) for byte in "→".encode()] == ["", "", "→"]
    assert stream.feed(b"\xff") == "�"
    assert stream.feed("→".encode()[:2]) == ""
    assert stream.finish() == "�"


def test_nothing_comes_after_a_stop_text() -> None:
    stream = TextStream(("b",))
    assert stream.feed(b"abc") == "a"
    assert stream.stopped
    assert stream.feed(b"more") == ""
    assert stream.finish() == ""
