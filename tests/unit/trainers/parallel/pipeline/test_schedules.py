"""Schedules: literal pictures, the orders of torch's own classes, and what holds for every shape."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestray.trainers.parallel.pipeline.schedules import (
    SCHEDULE_NAMES,
    default_stages_per_worker,
    make_programs,
    placement,
    problems,
)
from orchestray.trainers.parallel.pipeline.schedules.actions import Action, Kind, Program
from orchestray.trainers.parallel.pipeline.simulation import simulate

TAKES_ONE = ("1f1b", "pipedream")
IN_A_V = ("zbv", "dual_pipe_v")


def lines(programs: list[Program]) -> list[str]:
    return [" ".join(map(str, program)) for program in programs]


PICTURES: dict[tuple[str, int, int, int], list[str]] = {
    ("naive", 3, 1, 2): [
        "0F0 0B0 0F1 0B1",
        "1F0 1B0 1F1 1B1",
        "2F0 2B0 2F1 2B1",
    ],
    ("naive", 2, 2, 2): [
        "0F0 2F0 2B0 0B0 0F1 2F1 2B1 0B1",
        "1F0 3F0 3B0 1B0 1F1 3F1 3B1 1B1",
    ],
    ("gpipe", 3, 1, 3): [
        "0F0 0F1 0F2 0B0 0B1 0B2",
        "1F0 1F1 1F2 1B0 1B1 1B2",
        "2F0 2F1 2F2 2B0 2B1 2B2",
    ],
    ("gpipe", 2, 2, 2): [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1",
    ],
    ("1f1b", 3, 1, 4): [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ],
    ("1f1b", 4, 1, 2): [  # fewer micro-batches than workers
        "0F0 0F1 0B0 0B1",
        "1F0 1F1 1B0 1B1",
        "2F0 2F1 2B0 2B1",
        "3F0 3B0 3F1 3B1",
    ],
    ("pipedream", 4, 1, 5): [  # PipeDream, figure 4: after the start-up forward and backward take turns on all workers
        "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0B2 0B3 0B4",
        "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1B3 1B4",
        "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2B4",
        "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4",
    ],
    ("interleaved_1f1b", 2, 2, 4): [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ],
    ("interleaved_1f1b", 2, 2, 1): [
        "0F0 2F0 2B0 0B0",
        "1F0 3F0 3B0 1B0",
    ],
    ("interleaved_1f1b", 2, 2, 5): [  # planned for 6 micro-batches in 3 rounds of 2: the sixth is left out
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 0F4 2B2 2B3 2F4 0B2 0B3 2B4 0B4",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1F4 1B2 1B3 3F4 3B4 1B4",
    ],
    ("zero_bubble", 3, 1, 4): [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ],
    ("zbv", 2, 2, 3): [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
    ],
    ("dual_pipe_v", 2, 2, 4): [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3",
    ],
}


@pytest.mark.parametrize("shape", PICTURES, ids=str)
def test_a_schedule_is_its_picture(shape: tuple[str, int, int, int]) -> None:
    assert lines(make_programs(*shape)) == PICTURES[shape]


@pytest.mark.parametrize(
    ("name", "stages_per_worker", "stages"),
    [
        ("1f1b", 1, [(0,), (1,), (2,)]),
        ("interleaved_1f1b", 3, [(0, 3, 6), (1, 4, 7), (2, 5, 8)]),
        ("zbv", 2, [(0, 5), (1, 4), (2, 3)]),
        ("dual_pipe_v", 2, [(0, 5), (1, 4), (2, 3)]),
    ],
)
def test_stages_are_placed_in_a_loop_or_in_a_v(
    name: str, stages_per_worker: int, stages: list[tuple[int, ...]]
) -> None:
    assert placement(name, 3, stages_per_worker) == stages


@st.composite
def shapes(draw: st.DrawFn) -> tuple[str, int, int, int]:
    """Draw any shape that programs can be made for, sensible or not."""
    name = draw(st.sampled_from(SCHEDULE_NAMES))
    fixed = 1 if name in TAKES_ONE else 2 if name in IN_A_V else None
    stages_per_worker = fixed or draw(st.integers(1, 4))
    return name, draw(st.integers(1, 8)), stages_per_worker, draw(st.integers(1, 24))


@given(shape=shapes())
@settings(max_examples=300, deadline=None)
def test_every_stage_does_every_micro_batch_once_forward_and_once_backward(shape: tuple[str, int, int, int]) -> None:
    name, num_workers, stages_per_worker, num_micro_batches = shape
    stages = placement(name, num_workers, stages_per_worker)
    for worker, program in enumerate(make_programs(*shape)):
        kinds: dict[tuple[int, int], str] = {}
        for action in program:
            at = action.stage, action.micro_batch
            kinds[at] = kinds.get(at, "") + action.kind
        assert set(kinds) == {(stage, each) for stage in stages[worker] for each in range(num_micro_batches)}
        assert set(kinds.values()) <= {"FB", "FIW"}


@given(shape=shapes())
@settings(max_examples=100, deadline=None)
def test_programs_run_to_their_end_and_nothing_begins_before_what_it_needs(shape: tuple[str, int, int, int]) -> None:
    name, num_workers, stages_per_worker, _ = shape
    programs = make_programs(*shape)
    simulated = simulate(programs, placement(name, num_workers, stages_per_worker), 2, 4, transfer_s=1)
    times, last = simulated.times, num_workers * stages_per_worker - 1
    assert sorted(map(str, times)) == sorted(str(action) for program in programs for action in program)
    for action, timed in times.items():
        stage, kind, each = action
        needed = {
            Kind.FORWARD: [(stage - 1, "F")],
            Kind.BACKWARD: [(stage, "F"), (stage + 1, "BI")],
            Kind.BACKWARD_INPUT: [(stage, "F"), (stage + 1, "BI")],
            Kind.BACKWARD_WEIGHT: [(stage, "I")],
        }[kind]
        for before, kinds in needed:
            if 0 <= before <= last:
                found = [times[Action(before, Kind(k), each)] for k in kinds if Action(before, Kind(k), each) in times]
                assert len(found) == 1
                assert timed.begin_s >= found[0].end_s + (found[0].worker != timed.worker)


@given(shape=shapes())
@settings(max_examples=200, deadline=None)
def test_each_stage_takes_micro_batches_in_their_order(shape: tuple[str, int, int, int]) -> None:
    for program in make_programs(*shape):
        order: dict[tuple[int, str], list[int]] = {}
        for stage, kind, micro_batch in program:
            order.setdefault((stage, "backward" if kind in "BI" else kind), []).append(micro_batch)
        assert all(batches == sorted(batches) for batches in order.values())


class RecordingStage:
    """A stage of torch's pipelines that computes nothing, sends nothing, and notes its calls."""

    has_backward = True
    submod = None

    def __init__(self, index: int, num_workers: int, stages_per_worker: int = 1) -> None:
        self.stage_index, self.group_size = index, num_workers
        self.group_rank, self.num_stages = index % num_workers, num_workers * stages_per_worker
        self.is_first, self.is_last = index == 0, index == self.num_stages - 1
        self.told: list[str] = []

    def no_sends(self, _micro_batch: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_sends

    def forward_one_chunk(self, micro_batch: int, *_: Any, **__: Any) -> None:
        self.told.append(f"{self.stage_index}F{micro_batch}")

    def backward_one_chunk(self, micro_batch: int, **_: Any) -> None:
        self.told.append(f"{self.stage_index}B{micro_batch}")

    def perform_reduce_grad(self, _factor: int) -> None:
        pass


def executed(schedule_class: Any, num_workers: int, num_micro_batches: int) -> list[str]:
    """Return what torch's schedule of one stage a worker does, step by step.

    This is not the order it lists: in torch 2.13 that of 1F1B begins with the last stage's second micro-batch.
    """
    programs = []
    for index in range(num_workers):
        stage = RecordingStage(index, num_workers)
        schedule = schedule_class(stage, num_micro_batches)
        schedule._initialize_stage = lambda *_: None  # it would look at real tensors
        schedule._step_microbatches()
        programs.append(" ".join(stage.told))
    return programs


def listed(schedule_class: Any, num_workers: int, stages_per_worker: int, num_micro_batches: int) -> list[str]:
    """Return the order of torch's schedule of several stages a worker; of a pair the forward pass is first."""
    stages = [RecordingStage(local * num_workers, num_workers, stages_per_worker) for local in range(stages_per_worker)]
    order = schedule_class(stages, num_micro_batches).pipeline_order
    return [" ".join(_notation(order[worker])) for worker in range(num_workers)]


def _notation(actions: Iterable[Any]) -> Iterable[str]:
    for action in actions:
        if action is not None:
            yield from map(str, action.sub_actions or (action,))


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("name", "class_name"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
def test_schedules_of_one_stage_a_worker_do_what_torchs_do(name: str, class_name: str, num_workers: int) -> None:
    from torch.distributed import pipelining

    for num_micro_batches in range(num_workers, 2 * num_workers + 4):
        theirs = executed(getattr(pipelining, class_name), num_workers, num_micro_batches)
        assert lines(make_programs(name, num_workers, 1, num_micro_batches)) == theirs


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(
    ("name", "class_name", "stages_per_worker"),
    [
        ("interleaved_1f1b", "ScheduleInterleaved1F1B", 1),
        ("interleaved_1f1b", "ScheduleInterleaved1F1B", 2),
        ("interleaved_1f1b", "ScheduleInterleaved1F1B", 3),
        ("zero_bubble", "ScheduleInterleavedZeroBubble", 1),
        ("zero_bubble", "ScheduleInterleavedZeroBubble", 2),
        ("zero_bubble", "ScheduleInterleavedZeroBubble", 3),
        ("zbv", "ScheduleZBVZeroBubble", 2),
        ("dual_pipe_v", "ScheduleDualPipeV", 2),
    ],
)
def test_schedules_of_several_stages_a_worker_are_ordered_as_torchs(
    name: str, class_name: str, stages_per_worker: int, num_workers: int
) -> None:
    from torch.distributed import pipelining

    num_compared = 0
    for num_micro_batches in [*range(1, 2 * num_workers + 3), 4 * num_workers]:
        try:
            theirs = listed(getattr(pipelining, class_name), num_workers, stages_per_worker, num_micro_batches)
        except ValueError:  # torch has none of this shape
            continue
        assert lines(make_programs(name, num_workers, stages_per_worker, num_micro_batches)) == theirs
        num_compared += 1
    assert num_compared >= 3


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_the_default_number_of_stages_is_no_problem(name: str) -> None:
    stages_per_worker = default_stages_per_worker(name)
    assert stages_per_worker == (2 if name in (*IN_A_V, "interleaved_1f1b") else 1)
    assert problems(name, 4, stages_per_worker, 8) == []
    assert problems(name, 1, stages_per_worker, 1) == []
    assert problems(name, 4, stages_per_worker, 2) == []  # too few to fill the pipeline: slow, not wrong


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        (("2f2b", 2, 1, 4), "there is no schedule '2f2b': choose one of naive, gpipe, 1f1b, "),
        (("1f1b", 2, 2, 4), "1f1b has 1 stage a worker, got 2: set stages_per_worker to 1"),
        (("pipedream", 2, 3, 4), "pipedream has 1 stage a worker, got 3: set stages_per_worker to 1"),
        (("zbv", 2, 1, 4), "zbv has 2 stages a worker, one on each arm of its V, got 1: set stages_per_worker to 2"),
        (("dual_pipe_v", 2, 3, 4), "got 3: set stages_per_worker to 2"),
        (("interleaved_1f1b", 2, 1, 4), "set stages_per_worker to 2 or more, or the schedule to 1f1b"),
        (
            ("interleaved_1f1b", 4, 2, 9),
            "9 micro-batches in 2 rounds, which must be of one size: set microbatches to 8 or 10",
        ),
        (("zero_bubble", 2, 2, 5), "set microbatches to 4 or 6"),
        (("gpipe", 0, 1, 4), "there must be at least 1 pipeline worker, got 0"),
        (("gpipe", 2, 0, 4), "there must be at least 1 stage a worker, got 0"),
        (("interleaved_1f1b", 2, 2, 0), "there must be at least 1 micro-batch, got 0"),
    ],
)
def test_what_makes_no_sense_is_said_in_one_sentence(shape: tuple[str, int, int, int], sentence: str) -> None:
    (found,) = problems(*shape)
    assert sentence in found


@pytest.mark.parametrize("shape", [("2f2b", 2, 1, 4), ("1f1b", 2, 2, 4), ("zbv", 2, 1, 4), ("gpipe", 2, 1, 0)])
def test_there_are_no_programs_for_what_cannot_be_placed(shape: tuple[str, int, int, int]) -> None:
    with pytest.raises(ValueError) as raised:
        make_programs(*shape)
    assert [str(raised.value)] == problems(*shape)


@given(shape=shapes())
@settings(max_examples=200, deadline=None)
def test_the_numbers_of_micro_batches_a_problem_proposes_are_none(shape: tuple[str, int, int, int]) -> None:
    name, num_workers, stages_per_worker, num_micro_batches = shape
    for problem in problems(*shape):
        if "set microbatches to" in problem:
            below, above = map(int, problem.rpartition("microbatches to ")[2].split(" or "))
            assert below < num_micro_batches < above
            assert problems(name, num_workers, stages_per_worker, below) == []
            assert problems(name, num_workers, stages_per_worker, above) == []
