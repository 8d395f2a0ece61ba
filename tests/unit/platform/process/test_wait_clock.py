"""Waits of a GPU's stream are counted like those of the CPU."""

from __future__ import annotations

import pytest

from orchestray.platform.process.wait_clock import Waiting


class Stream:
    """A stream's clock that is set by hand, and says when the stream has come so far."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.is_done = False

    def mark(self) -> float:
        return self.now_s

    def seconds_between(self, first: float, second: float) -> float | None:
        return second - first if self.is_done else None


@pytest.mark.parametrize(("on_cpu_s", "on_stream_s"), [(0.0, 3.0), (2.0, 0.0), (2.0, 3.0)])
def test_a_wait_counts_as_long_as_the_stream_stands_still_whatever_the_cpu_does(
    on_cpu_s: float, on_stream_s: float
) -> None:
    now_s, stream = [10.0], Stream()
    waiting = Waiting(lambda: now_s[0])
    waiting.stream = stream
    with waiting.during():
        now_s[0] += on_cpu_s
        stream.now_s += on_stream_s
    assert waiting.total_s == 0.0  # the stream has not come to its end
    stream.is_done = True
    assert waiting.total_s == on_stream_s
    assert waiting.total_s == on_stream_s


def test_without_a_stream_the_cpu_s_waits_count_at_once() -> None:
    now_s = [10.0]
    waiting = Waiting(lambda: now_s[0])
    with waiting.during():
        now_s[0] += 2.0
    assert waiting.total_s == 2.0
