"""Schedules of a pipeline as pure data: which worker holds which stages, and the order of its actions.

A program is a list of actions and knows no tensors, times or other workers. An action begins when the one before it is
done and its inputs have come. This package does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

from orchestray.trainers.parallel.pipeline.schedules import interleaved, simple, v_shaped
from orchestray.trainers.parallel.pipeline.schedules.actions import Program
from orchestray.trainers.parallel.pipeline.schedules.place import Place

if __name__ != "orchestray.trainers.parallel.pipeline.schedules":
    raise ImportError(
        "import orchestray.trainers.parallel.pipeline.schedules: under another name it would be loaded twice"
    )

ScheduleName = Literal["naive", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dual_pipe_v", "pipedream"]
SCHEDULE_NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)


def _as_many(_num_workers: int, _stages_per_worker: int, num_micro_batches: int) -> int:
    return num_micro_batches


class _Schedule(NamedTuple):
    program: Callable[[Place, int], Program]
    """Function that returns one worker's program, for a number of micro-batches that `planned` has returned."""
    stages_per_worker: int = 1
    """Default number of stages a worker."""
    takes: Literal["one", "two", "any"] = "any"
    """Number of stages a worker that the schedule can place."""
    is_v: bool = False
    """True if the stages run from the last worker back to the first; False if they start at the first again."""
    planned: Callable[[int, int, int], int] = _as_many
    """Function from (workers, stages a worker, micro-batches) to the number of
    micro-batches to plan for, which may be higher.
    """


_SCHEDULES: dict[str, _Schedule] = {
    "naive": _Schedule(simple.naive),
    "gpipe": _Schedule(simple.gpipe),
    "1f1b": _Schedule(simple.one_forward_one_backward, takes="one"),
    "interleaved_1f1b": _Schedule(interleaved.interleaved_1f1b, 2, planned=interleaved.fitting),
    "zero_bubble": _Schedule(interleaved.zero_bubble, planned=interleaved.fitting),
    "zbv": _Schedule(v_shaped.zbv, 2, "two", is_v=True, planned=lambda workers, _, num: max(num, 2 * workers - 1)),
    "dual_pipe_v": _Schedule(
        v_shaped.dual_pipe_v, 2, "two", is_v=True, planned=lambda workers, _, num: max(num, 2 * workers)
    ),
    "pipedream": _Schedule(simple.one_forward_one_backward, takes="one"),
}


def default_stages_per_worker(name: str) -> int:
    """Return how many stages a worker holds by default."""
    return _schedule(name).stages_per_worker


def placement(name: str, num_workers: int, stages_per_worker: int) -> list[tuple[int, ...]]:
    """Return the stages of each worker, in the order data passes them.

    In a loop worker w of K holds stages w, K + w, 2K + w, ...; in a V (zbv, dual_pipe_v) it holds w and 2K - 1 - w.

    Raises:
        ValueError: the schedule is unknown, or it cannot place that many stages.
    """
    schedule = _schedule(name)
    _raise_if(_problems_of_stages(name, num_workers, stages_per_worker))
    if schedule.is_v:
        return [(worker, 2 * num_workers - 1 - worker) for worker in range(num_workers)]
    num_stages = num_workers * stages_per_worker
    return [tuple(range(worker, num_stages, num_workers)) for worker in range(num_workers)]


def make_programs(name: str, num_workers: int, stages_per_worker: int, num_micro_batches: int) -> list[Program]:
    """Return each worker's program for one step; for `pipedream`, for a stream of that many micro-batches.

    Any number of micro-batches gives programs that run to their end. If the schedule needs more of them, or another
    number, programs are planned for that number. The actions of the missing micro-batches are then left out. The rest
    keeps its order, so no action waits for a later one.

    Args:
        name: one of `SCHEDULE_NAMES`.
        num_workers: workers along the pipeline, >= 1.
        stages_per_worker: stages a worker, as many as the schedule takes (see `problems`).
        num_micro_batches: micro-batches of a step, >= 1.

    Raises:
        ValueError: the schedule is unknown, it cannot place that many stages, or a number is below 1.
    """
    schedule, placed = _schedule(name), placement(name, num_workers, stages_per_worker)
    _raise_if(_problems_of_count("micro-batch", num_micro_batches))
    planned = schedule.planned(num_workers, stages_per_worker, num_micro_batches)
    programs = [schedule.program(Place(worker, num_workers, stages), planned) for worker, stages in enumerate(placed)]
    if planned == num_micro_batches:
        return programs
    return [[action for action in program if action.micro_batch < num_micro_batches] for program in programs]


def problems(name: str, num_workers: int, stages_per_worker: int, num_micro_batches: int) -> list[str]:
    """Return what is wrong with these settings, in sentences; empty if nothing is.

    Fewer micro-batches than fill the pipeline are only slow, and not reported.
    """
    if name not in _SCHEDULES:
        return [_unknown(name)]
    found = _problems_of_stages(name, num_workers, stages_per_worker)
    found += _problems_of_count("micro-batch", num_micro_batches)
    if not found and name == "interleaved_1f1b" and stages_per_worker == 1:
        found.append(
            f"{name} takes turns between the stages of a worker, got 1 stage a worker: set stages_per_worker to 2 or "
            "more, or the schedule to 1f1b, which holds fewer activations"
        )
    if not found and _SCHEDULES[name].planned is interleaved.fitting:
        found += _problems_of_rounds(name, num_workers, stages_per_worker, num_micro_batches)
    return found


def _problems_of_stages(name: str, num_workers: int, stages_per_worker: int) -> list[str]:
    found = _problems_of_count("pipeline worker", num_workers) + _problems_of_count("stage a worker", stages_per_worker)
    takes = _SCHEDULES[name].takes
    if not found and takes == "one" and stages_per_worker != 1:
        found.append(
            f"{name} has 1 stage a worker, got {stages_per_worker}: set stages_per_worker to 1, or the schedule to one "
            "that takes several (interleaved_1f1b, zero_bubble, gpipe)"
        )
    if not found and takes == "two" and stages_per_worker != 2:
        found.append(
            f"{name} has 2 stages a worker, one on each arm of its V, got {stages_per_worker}: "
            "set stages_per_worker to 2"
        )
    return found


def _problems_of_rounds(name: str, num_workers: int, stages_per_worker: int, num_micro_batches: int) -> list[str]:
    if interleaved.round_size(num_workers, stages_per_worker, num_micro_batches) is not None:
        return []
    num_rounds = num_micro_batches // num_workers
    below = num_micro_batches - num_micro_batches % num_rounds
    above = interleaved.fitting(num_workers, stages_per_worker, num_micro_batches)
    sentence = (
        f"{name} on {num_workers} workers takes {num_micro_batches} micro-batches in {num_rounds} rounds, which must "
        f"be of one size: set microbatches to {below} or {above}"
    )
    return [sentence]


def _problems_of_count(what: str, number: int) -> list[str]:
    return [] if number >= 1 else [f"there must be at least 1 {what}, got {number}"]


def _schedule(name: str) -> _Schedule:
    _raise_if([] if name in _SCHEDULES else [_unknown(name)])
    return _SCHEDULES[name]


def _unknown(name: str) -> str:
    return f"there is no schedule '{name}': choose one of {', '.join(SCHEDULE_NAMES)}"


def _raise_if(found: list[str]) -> None:
    if found:
        raise ValueError("; ".join(found))
