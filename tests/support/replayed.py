"""The calls of a simulated search, made again."""

from __future__ import annotations

from collections.abc import Sequence

from orchestray.search.methods.base import Method
from orchestray.search.simulation.virtual_time import Call


def replay(method: Method, calls: Sequence[Call]) -> None:
    """Make the calls of a journal again, as a search does that goes on after it was killed.

    Args:
        method: a new one, of the same arguments as the one that the journal is of.
        calls: a journal, or the first part of one.

    Raises:
        AssertionError: the method answers another thing than it did.
    """
    for number, call in enumerate(calls):
        answer = call.made_to(method)
        assert answer == call.answer, f"call {number} ({call.name}) was answered {call.answer}, and now {answer}"
