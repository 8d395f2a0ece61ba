"""Policies for the death of members."""

from __future__ import annotations

from orchestray.platform.actors.policies import GiveUp, Recover, after_loss


def test_a_loss_is_recovered_from_as_often_as_max_restarts_says() -> None:
    assert after_loss({2: "killed", 0: "killed"}, restarts=2, max_restarts=3) == Recover((0, 2))
    given_up = after_loss({2: "killed by signal 9"}, restarts=3, max_restarts=3)
    assert isinstance(given_up, GiveUp)
    assert given_up.reason.startswith("Worker 2 died (killed by signal 9) after 3 recoveries, and max_restarts is 3. ")


def test_who_died_is_named_by_role() -> None:
    given_up = after_loss({0: "killed"}, restarts=1, max_restarts=1, role="parameter_server")
    assert isinstance(given_up, GiveUp)
    assert given_up.reason.startswith("Parameter server 0 died (killed) after 1 recovery, and")
