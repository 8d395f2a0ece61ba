"""The group of workers under parameter servers: which answers are expected, and for how long."""

from __future__ import annotations

from typing import Any

import pytest

from orchestray.trainers.driver.servers import worker_group
from orchestray.trainers.driver.servers.worker_group import WorkerGroup


def working(group: Any = None) -> WorkerGroup:
    workers = WorkerGroup(group, 1, group, None, attempt=lambda _rank: 0)
    workers.working = {"answer of 0": 0, "answer of 1": 1}
    return workers


def test_a_replica_that_was_to_stop_and_stays_silent_is_given_up_once_and_another_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_group, "_SETTLE_TIMEOUT_S", -1.0)
    group = working()
    group.call_off(0)
    assert group.overdue() == [0]
    assert group.working == {"answer of 1": 1}
    assert group.overdue() == []


def test_a_replica_that_is_to_stop_has_time_to_answer() -> None:
    group = working()
    group.call_off(0)
    assert group.overdue() == []
    assert len(group.working) == 2


def test_a_group_that_begins_again_expects_neither_answers_nor_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group, "_SETTLE_TIMEOUT_S", -1.0)
    group = working()
    group.call_off(0)
    group.forget()
    assert group.working == {}
    assert group.overdue() == []
