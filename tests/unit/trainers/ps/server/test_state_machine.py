"""The state machine of a server, and what it says of calls that it cannot answer."""

from __future__ import annotations

import pytest

from orchestray.platform.errors import TrainingError
from support.central import Plan


def test_only_the_lead_has_a_coordinator() -> None:
    other = Plan(shards=2).machine(1)
    with pytest.raises(TrainingError, match=r"^This server has no coordinator: orders and reports go to the lead"):
        other.apply({"worker": 0, "leave": True})


def test_a_call_that_the_coordinator_does_not_have_is_refused_with_those_there_are() -> None:
    lead = Plan().machine(0)
    with pytest.raises(TrainingError, match="cannot call 'reign' on the coordinator; only request_stop, resize and"):
        lead.apply({"coordinator": ["reign", {}]})
