"""The journal of a method that is repeated: what it cannot be repeated from is refused with a way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from orchestray.search.engine.session import MemoryJournal, MethodSession, SearchError
from orchestray.search.methods.base import Method, Report
from orchestray.search.registry.methods import make_method
from orchestray.search.spaces.dimensions import make_dimension


def method() -> Method:
    return make_method("random", space={"lr": make_dimension("uniform", low=0.1, high=1.0)}, trials=2)


def journal() -> list[dict[str, Any]]:
    """Return the calls of a search whose first trial has ended."""
    session = MethodSession(method(), kept := MemoryJournal())
    session.ask()
    session.report(Report(0, 1, 0.5))
    session.tell(0, "succeeded")
    return kept.entries()


def test_a_journal_is_repeated_and_the_method_goes_on() -> None:
    session = MethodSession(method(), MemoryJournal(journal()))
    proposal = session.ask()
    assert proposal is not None
    assert proposal.trial == 1


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda calls: calls[1].pop("released"), r"line 2 .* \(report lacks released\)"),
        (lambda calls: calls.insert(1, {"call": "muse"}), r"line 2 .* \('muse' is no call; known are ask, allow, "),
        (lambda calls: calls[0].pop("call"), r"line 1 .* \(None is no call"),
        (lambda calls: calls[1]["report"].update(novel=1), r"line 2 .* \(report: TypeError: .*'novel'\)"),
        (lambda calls: calls[0].update(proposal=7), r"line 1 .* \(ask: TypeError"),
        (lambda calls: calls[1]["report"].update(trial=9), r"line 2 .* \(report: KeyError: 9\)"),
        (lambda calls: calls[0]["proposal"].pop("program"), r"line 1 .* \(ask: KeyError: 'program'\)"),
        (lambda calls: calls[0]["proposal"].update(changes={}), r"to call 1 .* has changed since\."),
    ],
)
def test_a_journal_that_cannot_be_repeated_is_refused_with_the_line_and_what_to_do(
    spoil: Callable[[list[dict[str, Any]]], object], why: str
) -> None:
    calls = journal()
    spoil(calls)
    way_out = r".*Go on with the version of orchestray that the search began with, or start a new search, .*learn_from"
    with pytest.raises(SearchError, match=f"(?s)^The search cannot go on: {why}{way_out}"):
        MethodSession(method(), MemoryJournal(calls))
