"""The state machine of a server, and what it says of calls that it cannot answer."""

from __future__ import annotations

import pytest

from orchestray.platform.errors import TrainingError
from orchestray.trainers.ps.protocol.requests import Entry
from support.central import Plan


def test_only_the_lead_has_a_coordinator() -> None:
    other = Plan(shards=2).machine(1)
    with pytest.raises(TrainingError, match=r"^This server has no coordinator: orders and reports go to the lead"):
        other.apply(Entry(worker=0, leave=True))
