"""Each kill happens once, whatever else is lost, and whatever is resumed."""

from __future__ import annotations

from typing import Any

from orchestray.trainers.core.faults import FaultPlan
from orchestray.trainers.driver.runlog.kill_schedule import KillSchedule, described, still_to_happen


def kill(rank: int, at_step: int, role: str = "worker") -> dict[str, Any]:
    return {"kind": "kill", "role": role, "rank": rank, "at_step": at_step}


FAULTS = [kill(1, 5), kill(0, 5), kill(1, 9), kill(0, 2, "parameter_server"), {**kill(0, 1), "kind": "slow"}]


def killed(faults: Any, rank: int, attempt: int, *, is_alone: bool = False) -> list[int]:
    plan = FaultPlan.of(faults, "worker", rank, attempt=attempt, is_alone=is_alone)
    return [step for step in range(1, 12) if plan.kills(step)]


def test_the_kill_that_has_happened_is_over_and_the_next_one_due() -> None:
    kills = KillSchedule(FAULTS, "worker")
    due = [killed(FAULTS, 1, kills.num_over())]
    assert kills.lost([1]) == [FAULTS[0]]
    due.append(killed(FAULTS, 1, kills.num_over()))
    assert kills.lost([0, 1]) == [FAULTS[2]]
    due.append(killed(FAULTS, 1, kills.num_over()))
    assert due == [[5], [9], []]
    assert kills.lost([0, 1]) == []


def test_a_loss_that_no_kill_explains_leaves_the_kill_due() -> None:
    kills = KillSchedule([kill(1, 5)], "worker")
    assert kills.lost([0]) == kills.lost([]) == []
    assert killed([kill(1, 5)], 1, kills.num_over()) == [5]


def test_all_that_die_at_one_step_are_told_of() -> None:
    kills = KillSchedule(FAULTS, "worker")
    assert kills.lost([0, 1]) == FAULTS[:2]
    assert kills.num_over() == 1


def test_a_process_that_is_replaced_by_itself_has_kills_of_its_own() -> None:
    kills = KillSchedule(FAULTS, "worker", is_alone=True)
    assert kills.lost([1]) == [FAULTS[0]]
    assert (kills.num_over(0), kills.num_over(1)) == (0, 1)
    assert killed(FAULTS, 0, kills.num_over(0), is_alone=True) == [5]
    assert killed(FAULTS, 1, kills.num_over(1), is_alone=True) == [9]


def test_a_resumed_run_leaves_out_the_kills_that_are_past_or_have_happened() -> None:
    events = [{"event": "started"}, {"event": "fault", **described(FAULTS[2])}]
    assert still_to_happen(FAULTS, events, 0) == (*FAULTS[:2], *FAULTS[3:])
    assert still_to_happen(FAULTS, events, 4) == (*FAULTS[:2], FAULTS[4])
    assert still_to_happen(FAULTS, [], 5) == (FAULTS[2], FAULTS[4])


def test_the_kills_that_are_left_out_take_no_attempt_from_those_to_come() -> None:
    left = still_to_happen(FAULTS, [], 6)
    assert killed(left, 1, KillSchedule(left, "worker").num_over()) == [9]


def test_the_workers_of_another_engine_hear_of_the_kills_that_are_over() -> None:
    import asyncio

    from orchestray.trainers.driver.engines.mailbox import Mailbox

    async def told() -> tuple[list[int], list[tuple[str, Any]]]:
        mailbox = Mailbox(2, [kill(1, 5), kill(0, 7)])
        counts = [await mailbox.num_kills_over()]
        await mailbox.lost({1: "it was killed"})
        counts.append(await mailbox.num_kills_over())
        return counts, await mailbox.take(0)

    counts, messages = asyncio.run(told())
    assert counts == [0, 1]
    fault = ("fault", {"kind": "kill", "role": "worker", "rank": 1, "at_step": 5})
    assert messages == [fault, ("lost", {1: "it was killed"})]
