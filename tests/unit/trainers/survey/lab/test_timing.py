"""Ways are timed in turns, and settings are put back."""

from __future__ import annotations

import pytest
import torch

from orchestray.trainers.survey.lab import timing
from orchestray.trainers.survey.lab.timing import threads, times_s


def test_each_way_has_a_time_for_each_round_in_an_order_that_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_LEAST_S", 0.0)
    called: list[str] = []
    found = times_s({name: lambda name=name: called.append(name) for name in "abc"}, 4)
    assert {name: len(taken) for name, taken in found.items()} == dict.fromkeys("abc", 4)
    assert "".join(called[6:]) == "abc" + "bca" + "cab" + "abc"


def test_a_short_way_is_repeated_and_its_time_is_that_of_one_call() -> None:
    now = iter(range(10**6))
    calls = 0

    def way() -> None:
        nonlocal calls
        calls += 1

    taken = times_s({"way": way}, 1, clock=lambda: next(now) * 1e-3)["way"]
    assert taken == [pytest.approx(0.5e-3)]  # two calls between two looks at the clock
    assert calls == 2 + 2


def test_threads_are_put_back_after_an_error() -> None:
    before = torch.get_num_threads()

    def fail() -> None:
        with threads(before + 1):
            assert torch.get_num_threads() == before + 1
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert torch.get_num_threads() == before
