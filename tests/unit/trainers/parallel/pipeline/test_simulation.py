"""Schedules in virtual time: bubbles, activations held, latency, throughput and staleness are what their papers say."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestray.trainers.parallel.pipeline.schedules import (
    SCHEDULE_NAMES,
    default_stages_per_worker,
    make_programs,
    placement,
)
from orchestray.trainers.parallel.pipeline.schedules.actions import Action, Kind
from orchestray.trainers.parallel.pipeline.simulation import (
    DeadlockError,
    Simulated,
    live_activations,
    needs,
    simulate,
    staleness,
)

V_NAMES = ("zbv", "dual_pipe_v")
FORWARD = Action(0, Kind.FORWARD, 0)


def run(
    name: str, num_workers: int, num_micro_batches: int, stages_per_worker: int | None = None, **times: Any
) -> Simulated:
    per_worker = stages_per_worker or default_stages_per_worker(name)
    programs = make_programs(name, num_workers, per_worker, num_micro_batches)
    times = {"forward_s": 1, "backward_s": 2, "input_s": 1, "weight_s": 1, **times}
    return simulate(programs, placement(name, num_workers, per_worker), **times)


def picture(simulated: Simulated) -> list[str]:
    """Return a row a worker, with a character a second.

    Small letters are forward passes, capitals backward ones (a, A: the first micro-batch).
    """
    rows = []
    for timed in simulated.workers:
        row = ["."] * int(simulated.span_s)
        for _, action, begin_s, end_s in timed:
            for second in range(int(begin_s), int(end_s)):
                row[second] = "abcdefgh"[action.micro_batch] if action.kind == "F" else "ABCDEFGH"[action.micro_batch]
        rows.append("".join(row))
    return rows


@pytest.mark.parametrize(
    ("name", "stages_per_worker", "rows"),
    [
        ("naive", 1, ["a...AAb...BB", ".aAA...bBB.."]),
        ("gpipe", 1, ["abcd...AABBCCDD", ".abcdAABBCCDD.."]),
        ("1f1b", 1, ["ab..AAcBBdCC.DD", ".aAAbBBcCCdDD.."]),
        ("zero_bubble", 1, ["ab.AAcBBdCCDD", ".aAbBAcCBdDCD"]),
        ("interleaved_1f1b", 2, ["ababc.AAdBBcAAdBB.CC.DDCCDD", ".abaAAbBBcAAdBBcCCdDDCCDD.."]),
    ],
)
def test_two_workers_and_four_micro_batches_are_their_picture(
    name: str, stages_per_worker: int, rows: list[str]
) -> None:
    num_micro_batches = 2 if name == "naive" else 4
    assert picture(run(name, 2, num_micro_batches, stages_per_worker)) == rows


SIZES = [(1, 1), (2, 1), (2, 7), (3, 3), (4, 4), (4, 16), (7, 9), (5, 3)]


@pytest.mark.parametrize(("num_workers", "num_micro_batches"), SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_of_gpipe_and_1f1b_is_k_minus_1_of_m_plus_k_minus_1(
    name: str, num_workers: int, num_micro_batches: int
) -> None:
    expected = Fraction(num_workers - 1, num_micro_batches + num_workers - 1)
    for forward_s, backward_s in ((1, 2), (1, 1), (3, 5)):
        simulated = run(
            name, num_workers, num_micro_batches, forward_s=Fraction(forward_s, 7), backward_s=Fraction(backward_s, 7)
        )
        assert simulated.bubble == expected
        assert simulated.busy_s == (num_micro_batches * Fraction(forward_s + backward_s, 7),) * num_workers


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("stages_per_worker", [1, 3])
def test_naive_keeps_one_worker_busy_at_a_time(num_workers: int, stages_per_worker: int) -> None:
    simulated = run("naive", num_workers, 5, stages_per_worker, forward_s=Fraction(1, 3), backward_s=Fraction(1, 7))
    assert 1 - simulated.bubble == Fraction(1, num_workers)
    times = sorted(simulated.times.values(), key=lambda timed: timed.begin_s)
    assert all(before.end_s == after.begin_s for before, after in itertools.pairwise(times))


@pytest.mark.parametrize(("num_workers", "rounds"), [(2, 1), (2, 4), (4, 1), (4, 3)])
@pytest.mark.parametrize("stages_per_worker", [2, 3])
def test_interleaving_divides_the_bubbles_time_by_the_stages_a_worker(
    num_workers: int, rounds: int, stages_per_worker: int
) -> None:
    """Check Narayanan et al. (SC 2021), section 2.2.2: of the ideal time, (K - 1) / (V M) is bubble."""
    num_micro_batches = rounds * num_workers
    simulated = run("interleaved_1f1b", num_workers, num_micro_batches, stages_per_worker)
    ideal_s = simulated.busy_s[0]
    assert simulated.span_s - ideal_s == Fraction(num_workers - 1, stages_per_worker * num_micro_batches) * ideal_s


@pytest.mark.parametrize("num_workers", [2, 3, 4, 8])
def test_zero_bubble_has_a_third_of_the_bubble_of_1f1b_and_the_v_has_less(num_workers: int) -> None:
    """Check Qi et al. (ICLR 2024), section 2.3, with equal times.

    ZB-H1 waits (K - 1)(F + I - W), 1F1B (K - 1)(F + I + W).
    """
    num_micro_batches = 3 * num_workers
    plain, split = run("1f1b", num_workers, num_micro_batches), run("zero_bubble", num_workers, num_micro_batches)
    assert plain.span_s - plain.busy_s[0] == 3 * (num_workers - 1)
    assert split.span_s - split.busy_s[0] == num_workers - 1
    half: dict[str, Any] = {
        "forward_s": 0.5,
        "backward_s": 1,
        "input_s": 0.5,
        "weight_s": 0.5,
    }  # a worker's stages are two halves
    for name in ("zbv", "dual_pipe_v"):
        v_shaped = run(name, num_workers, num_micro_batches, **half)
        assert v_shaped.busy_s == split.busy_s
        assert v_shaped.bubble < split.bubble < plain.bubble


@pytest.mark.parametrize(("num_workers", "num_micro_batches"), SIZES)
def test_gpipe_holds_all_micro_batches_and_1f1b_no_more_than_the_stages_ahead(
    num_workers: int, num_micro_batches: int
) -> None:
    assert run("gpipe", num_workers, num_micro_batches).live_activations == (num_micro_batches,) * num_workers
    ahead = tuple(min(num_workers - stage, num_micro_batches) for stage in range(num_workers))
    for name in ("1f1b", "pipedream"):
        assert run(name, num_workers, num_micro_batches).live_activations == ahead
    assert run("naive", num_workers, num_micro_batches).live_activations == (1,) * num_workers


@given(num_workers=st.integers(1, 8), num_micro_batches=st.integers(1, 30))
def test_zero_bubble_holds_no_more_than_the_first_worker_of_1f1b(num_workers: int, num_micro_batches: int) -> None:
    assert max(live_activations(make_programs("zero_bubble", num_workers, 1, num_micro_batches))) <= num_workers


@given(
    name=st.sampled_from(SCHEDULE_NAMES),
    num_workers=st.integers(1, 6),
    forward_s=st.integers(1, 9),
    wire_s=st.integers(0, 5),
)
@settings(deadline=None)
def test_the_latency_of_one_sample_is_linear_in_the_number_of_stages(
    name: str, num_workers: int, forward_s: int, wire_s: int
) -> None:
    stages_per_worker = default_stages_per_worker(name)
    simulated = run(name, num_workers, 1, forward_s=forward_s, backward_s=0, input_s=0, weight_s=0, transfer_s=wire_s)
    # A pipeline's hops; at the turn of a V the data stays on its worker, and in a loop of one it never leaves it.
    hops = num_workers * stages_per_worker - 1 - (name in V_NAMES) if num_workers > 1 else 0
    last = simulated.times[Action(num_workers * stages_per_worker - 1, Kind.FORWARD, 0)]
    assert last.end_s == num_workers * stages_per_worker * forward_s + hops * wire_s
    assert simulated.latency_s(0) == last.end_s + hops * wire_s  # and the way back


@pytest.mark.parametrize("between_s", [1, 5, 6, 7, 20])
@pytest.mark.parametrize("backward_s", [[2, 2, 2], [2, 4, 3], [5, 1, 1]])
def test_throughput_is_the_lesser_of_the_feed_and_the_slowest_stage(between_s: int, backward_s: list[int]) -> None:
    arrivals = [between_s * each for each in range(60)]
    simulated = run("pipedream", 3, 60, forward_s=1, backward_s=backward_s, arrivals=arrivals)
    done = [simulated.times[Action(0, Kind.BACKWARD, each)].end_s for each in range(60)]
    slowest_s = 1 + max(backward_s)
    # In the steady state: after the pipeline has filled, before the feed has ended.
    assert done[50] - done[20] == 30 * max(between_s, slowest_s)


def test_a_micro_batch_is_not_begun_before_it_arrives() -> None:
    simulated = run("gpipe", 2, 3, arrivals=[0.5, 0.75, 9.0])
    assert [timed.begin_s for timed in simulated.workers[0][:3]] == [0.5, 1.5, 9.0]
    assert simulated.span_s == simulated.workers[0][-1].end_s - 0.5


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 6])
def test_pipedream_has_staleness_k_minus_1_minus_stage_and_holds_as_many_versions_and_one(num_workers: int) -> None:
    found = staleness(make_programs("pipedream", num_workers, 1, 4 * num_workers))
    for stage, ages in enumerate(found.updates):
        oldest = num_workers - 1 - stage
        assert list(ages) == [min(each, oldest) for each in range(4 * num_workers)]
        assert found.versions_held[stage] == oldest + 1


def test_an_update_counts_when_the_weights_gradient_is_there() -> None:
    """Check that an update in halves waits for the later one: a forward pass between them sees the old weights."""
    split = [
        [Action(0, Kind(kind), each) for kind, each in (("F", 0), ("I", 0), ("F", 1), ("W", 0), ("I", 1), ("W", 1))]
    ]
    assert staleness(split) == (((0, 1),), (2,))
    whole = [[Action(0, Kind(kind), each) for kind, each in (("F", 0), ("B", 0), ("F", 1), ("B", 1))]]
    assert staleness(whole) == (((0, 0),), (1,))


def test_half_of_the_backward_time_is_the_halves_default() -> None:
    halves = [[Action(0, kind, 0) for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)]]
    simulated = simulate(halves, [(0,)], 1.0, [3.0])
    assert [timed.end_s for timed in simulated.workers[0]] == [1.0, 2.5, 4.0]


def test_transfers_take_time_between_workers_and_none_within_one() -> None:
    forward = [[Action(0, Kind.FORWARD, 0), Action(2, Kind.FORWARD, 0), Action(3, Kind.FORWARD, 0)]]
    forward.append([Action(1, Kind.FORWARD, 0)])
    simulated = simulate(forward, [(0, 2, 3), (1,)], 1, 1, transfer_s=10)
    assert [timed.begin_s for timed in simulated.workers[0]] == [0, 22, 23]
    assert simulated.bubble == 44 / 48


@given(
    name=st.sampled_from(SCHEDULE_NAMES),
    num_workers=st.integers(1, 6),
    num_micro_batches=st.integers(1, 12),
    transfer_s=st.sampled_from((0.0, 0.37)),
    seed=st.integers(0, 10**6),
)
@settings(deadline=None)
def test_each_action_begins_when_the_one_before_it_is_done_and_its_inputs_have_come(
    name: str, num_workers: int, num_micro_batches: int, transfer_s: float, seed: int
) -> None:
    draw, num_stages = random.Random(seed), num_workers * default_stages_per_worker(name)
    times = {
        each: [draw.random() for _ in range(num_stages)] for each in ("forward_s", "backward_s", "input_s", "weight_s")
    }
    arrivals = sorted(draw.random() for _ in range(num_micro_batches))
    simulated = run(name, num_workers, num_micro_batches, transfer_s=transfer_s, arrivals=arrivals, **times)
    lasts_s = dict(zip(Kind, times.values(), strict=True))
    for actions in simulated.workers:
        free_s = 0.0
        for worker, action, begin_s, end_s in actions:
            known = [simulated.times[each] for each in needs(action, num_stages, simulated.times)]
            came_s = [each.end_s + transfer_s * (each.worker != worker) for each in known] or [
                arrivals[action.micro_batch]
            ]
            assert begin_s == max(free_s, *came_s)
            assert end_s == begin_s + lasts_s[action.kind][action.stage]
            free_s = end_s
    ends_s = [timed.end_s for timed in simulated.times.values()]
    assert simulated.span_s == max(ends_s) - min(timed.begin_s for timed in simulated.times.values())


def test_programs_that_wait_for_one_another_are_named_with_what_they_wait_for() -> None:
    waiting = [[Action(0, Kind.BACKWARD, 0)], [Action(1, Kind.FORWARD, 0)]]
    with pytest.raises(DeadlockError, match="worker 0 at 0B0, worker 1 at 1F0"):
        simulate(waiting, [(0,), (1,)], 1, 1)


@pytest.mark.parametrize(
    ("placed", "forward_s", "message"),
    [
        ([(1,)], 1, "every stage of 0, 1, ... must be on exactly one worker"),
        ([(0,), (1,)], 1, "2 workers, but programs of 1"),
        ([(0,)], [1, 1], "1 stages, but times of 2"),
    ],
)
def test_what_does_not_fit_the_programs_is_refused(placed: Any, forward_s: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate([[FORWARD]], placed, forward_s, 1)
    with pytest.raises(ValueError, match="worker 1 is to do 0F0, but does not hold stage 0"):
        simulate([[], [FORWARD]], [(0,), (1,)], 1, 1)


def test_a_simulation_can_be_read_as_a_runs_timeline() -> None:
    (step,) = run("zero_bubble", 2, 2).timeline(step=7)["steps"]
    assert step["step"] == 7
    assert step["actions"][0] == {"rank": 0, "stage": 0, "kind": "F", "micro_batch": 0, "begin_s": 0.0, "end_s": 1.0}
    assert {action["kind"] for action in step["actions"]} == {"F", "I", "W"}
    assert len(step["actions"]) == 12
