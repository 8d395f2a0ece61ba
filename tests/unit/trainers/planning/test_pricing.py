"""A step's operations are replayed in virtual time: waits, queues and what is hidden, in closed cases."""

from __future__ import annotations

import pytest

from orchestray.trainers.layout.degrees import Layout
from orchestray.trainers.planning.found import DryRun, DryStep, NotedCall
from orchestray.trainers.planning.pricing import axis_of, memory_of, sent_bytes, step_parts, waits


def call(
    began_s: float, waited_s: float | None, num_bytes: int = 1, kind: str = "all_reduce", size: int = 2
) -> NotedCall:
    return NotedCall(kind, "world", size, num_bytes, began_s, waited_s)


def a_second_a_byte(_kind: str, _size: int, num_bytes: int) -> float:
    return float(num_bytes)


def test_an_operation_that_is_waited_for_at_once_takes_all_its_time() -> None:
    found = waits([call(0.0, 0.0, 3)], a_second_a_byte, overlap=1.0)
    assert (found.shown_s, found.hidden_s) == (3.0, 0.0)


def a_second_and_one_a_byte(kind: str, size: int, num_bytes: int) -> float:
    return 1.0 + num_bytes


@pytest.mark.parametrize(("overlap", "shown_s"), [(1.0, 1.0), (0.0, 1.0 + 2.0 * 2 / 3)])
def test_latency_behind_computation_costs_a_worker_nothing_and_bytes_share_the_cores_with_it(
    overlap: float, shown_s: float
) -> None:
    found = waits([call(0.0, 2.0, 2)], a_second_and_one_a_byte, overlap)
    assert found.shown_s == pytest.approx(shown_s)
    assert found.shown_s + found.hidden_s == pytest.approx(3.0)
    assert waits([call(0.0, 1.0, 0)], a_second_and_one_a_byte, overlap).shown_s == 0.0


def test_operations_under_way_together_wait_for_each_others_bytes_and_not_for_their_latency() -> None:
    found = waits([call(0.0, 0.0, 2), call(0.0, 0.0, 0)], a_second_and_one_a_byte, overlap=1.0)
    assert found.shown_s == 3.0


@pytest.mark.parametrize(("overlap", "shown_s", "hidden_s"), [(1.0, 1.0, 2.0), (0.0, 3.0, 0.0), (0.5, 2.0, 1.0)])
def test_what_is_behind_computation_is_hidden_as_far_as_the_cores_allow(
    overlap: float, shown_s: float, hidden_s: float
) -> None:
    found = waits([call(0.0, 2.0, 3)], a_second_a_byte, overlap)
    assert (found.shown_s, found.hidden_s) == (shown_s, hidden_s)


def test_an_operation_begins_when_the_one_before_it_has_ended() -> None:
    found = waits([call(0.0, 1.0, 2), call(0.5, 1.0, 2)], a_second_a_byte, overlap=1.0)
    # They end at 2 and 4: the waits at 1 take 3 seconds together.
    assert found.shown_s == pytest.approx(3.0)


def test_a_wait_delays_all_that_follows() -> None:
    found = waits([call(0.0, 0.0, 2), call(1.0, 2.0, 3)], a_second_a_byte, overlap=1.0)
    # The second begins at 3, is wanted at 4 and ends at 6.
    assert found.shown_s == pytest.approx(2.0 + 2.0)


def test_a_message_each_way_at_once_takes_the_time_of_one() -> None:
    both = [call(0.0, 0.0, 4, "receive"), call(0.0, 0.0, 4, "send")]
    assert waits(both, a_second_a_byte, overlap=1.0).shown_s == 4.0
    assert waits(both[1:], a_second_a_byte, overlap=1.0).shown_s == 4.0


def test_an_operation_that_nobody_waits_for_delays_the_next_one_only() -> None:
    assert waits([call(0.0, None, 5)], a_second_a_byte, overlap=1.0).shown_s == 0.0
    assert waits([call(0.0, None, 5), call(0.0, 0.0, 1)], a_second_a_byte, overlap=1.0).shown_s == 6.0


def run(every: int = 1, *, times_s: tuple[float, ...] = (1.0,)) -> DryRun:
    exchanging = DryStep(10.0, 6.0, 1.0, 2.0, (call(7.0, 7.0, 8),))
    plain = DryStep(8.0, 5.0, 0.0, 2.0, ())
    return DryRun(every, plain if every > 1 else None, exchanging, 4, 4, 8, 2, 100, 20, times_s)


def test_the_parts_of_a_step_add_up_to_the_dry_step_and_its_waits() -> None:
    parts = step_parts([run()], a_second_a_byte, overlap=0.0)
    assert parts.total_s == 10.0 + 8.0
    assert (parts.compute_s, parts.exchange_s, parts.optimizer_s, parts.loop_s) == (6.0, 9.0, 2.0, 1.0)


def test_an_exchange_every_fourth_step_counts_a_quarter() -> None:
    parts = step_parts([run(every=4)], a_second_a_byte, overlap=0.0)
    assert parts.total_s == pytest.approx((18.0 + 3 * 8.0) / 4)
    assert sent_bytes(run(every=4), Layout(data=2)) == {"data": 4}


def test_workers_in_step_wait_for_the_slower_of_them() -> None:
    one, other = run(times_s=(1.0, 3.0, 1.0, 3.0)), run(times_s=(3.0, 1.0, 3.0, 1.0))
    assert step_parts([one, other], a_second_a_byte, overlap=0.0).bubble_s == pytest.approx(1.0)


def test_a_group_of_all_workers_lies_along_the_only_axis_there_is() -> None:
    assert axis_of("world", Layout(tensor=4)) == "tensor"
    assert axis_of("world", Layout(data=2, tensor=2)) == "world"
    assert axis_of("data", Layout(data=2, tensor=2)) == "data"


def test_the_kinds_of_memory_add_up_to_the_resident_set() -> None:
    memory = memory_of(run(), 50)
    assert (memory.parameters, memory.gradients, memory.optimizer, memory.activations) == (4, 4, 8, 2)
    assert memory.resident == 150
    assert memory_of(run(), 50, grown_bytes=200).resident == 250
