"""A simulation of programs in virtual time: when each action begins and ends, who waits, what is held. It uses no
threads and no clock.

Times may be Fractions as well as floats, and then stay exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise, repeat
from math import inf
from operator import sub
from typing import Any, NamedTuple

from orchestray.trainers.parallel.pipeline.schedules.actions import Action, Kind, Program

Seconds = float | Sequence[float]
"""Seconds for every stage alike, or one number a stage."""


class DeadlockError(ValueError):
    """An error: every unfinished worker waits for an action that will not come."""


class Timed(NamedTuple):
    """An action with its begin and end."""

    worker: int
    action: Action
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Simulated:
    """The result of a simulation."""

    programs: Sequence[Program]
    begins_s: Sequence[Sequence[float]]
    """Begin of each action of each worker, in its order."""
    ends_s: Sequence[Sequence[float]]
    """End of each action of each worker."""

    @cached_property
    def workers(self) -> tuple[tuple[Timed, ...], ...]:
        """Actions of each worker, in order."""
        each = enumerate(zip(self.programs, self.begins_s, self.ends_s, strict=True))
        return tuple(tuple(map(Timed, repeat(worker), *its_actions)) for worker, its_actions in each)

    @cached_property
    def times(self) -> Mapping[Action, Timed]:
        return {timed.action: timed for actions in self.workers for timed in actions}

    @property
    def num_workers(self) -> int:
        return len(self.programs)

    @cached_property
    def span_s(self) -> float:
        """Seconds from the begin of the first action to the end of the last."""
        return max(ends[-1] for ends in self.ends_s if ends) - min(begins[0] for begins in self.begins_s if begins)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds that each worker spends in its actions."""
        return tuple(sum(map(sub, ends, begins)) for begins, ends in zip(self.begins_s, self.ends_s, strict=True))

    @property
    def bubble(self) -> float:
        """Fraction of the workers' time in which they wait, from 0 to 1: 1 - busy / (workers x span)."""
        available_s = self.num_workers * self.span_s
        return (available_s - sum(self.busy_s)) / available_s if available_s else 0

    @cached_property
    def live_activations(self) -> tuple[int, ...]:
        """Most micro-batches at once whose activations each stage holds (see `live_activations`)."""
        return live_activations(self.programs)

    def latency_s(self, micro_batch: int) -> float:
        """Return the seconds from the begin of a micro-batch's first forward pass to the end of its last action."""
        times = [timed for timed in self.times.values() if timed.action.micro_batch == micro_batch]
        return max(timed.end_s for timed in times) - min(timed.begin_s for timed in times)

    def timeline(self, step: int = 1) -> dict[str, Any]:
        """Return the actions as a run records them in `timeline.json` (see `orchestray.platform.report.timeline`)."""
        actions = [
            {
                "rank": timed.worker,
                "stage": timed.action.stage,
                "kind": str(timed.action.kind),
                "micro_batch": timed.action.micro_batch,
                "begin_s": float(timed.begin_s),
                "end_s": float(timed.end_s),
            }
            for actions in self.workers
            for timed in actions
        ]
        return {"steps": [{"step": step, "actions": actions}]}


def simulate(
    programs: Sequence[Program],
    placement: Sequence[Sequence[int]],
    forward_s: Seconds,
    backward_s: Seconds,
    *,
    input_s: Seconds | None = None,
    weight_s: Seconds | None = None,
    transfer_s: float = 0,
    arrivals: Sequence[float] | None = None,
) -> Simulated:
    """Run programs on workers that do one action at a time, each as soon as it can.

    Args:
        programs: one program a worker (see `make_programs`).
        placement: the stages of each worker; each of the stages 0, 1, ... is on exactly one worker.
        forward_s: seconds of a forward pass.
        backward_s: seconds of a whole backward pass.
        input_s: seconds of the backward half for the input; default: half of `backward_s`.
        weight_s: seconds of the backward half for the weights; default: half of `backward_s`.
        transfer_s: seconds between the end of an action and the earliest begin of one on another worker that needs its
            result; both workers may compute meanwhile.
        arrivals: seconds at which each micro-batch reaches the first stage; default: all at 0.

    Raises:
        DeadlockError: the programs wait for one another; the message names each waiting worker and its action.
        ValueError: a program has an action of a stage that its worker does not hold.
    """
    worker_of = {stage: worker for worker, stages in enumerate(placement) for stage in stages}
    _check(programs, placement, worker_of)
    num_stages = len(worker_of)
    seconds = _durations(num_stages, forward_s, backward_s, input_s, weight_s)
    hops_s = [0 if one == other else transfer_s for one, other in pairwise(map(worker_of.get, range(num_stages)))]
    first = [each for stage, kind, each in programs[worker_of[0]] if stage == 0 and kind is Kind.FORWARD]
    begin_s = {each: 0 if arrivals is None else arrivals[each] for each in first}
    return _run(programs, seconds, hops_s, begin_s)


def needs(action: Action, num_stages: int, done: Mapping[Action, object]) -> list[Action]:
    """Return the actions whose results `action` uses; of a next stage's backward
    pass, the input half if it is in `done`.
    """
    stage, kind, micro_batch = action
    if kind is Kind.FORWARD:
        return [Action(stage - 1, kind, micro_batch)] if stage > 0 else []
    if kind is Kind.BACKWARD_WEIGHT:
        return [Action(stage, Kind.BACKWARD_INPUT, micro_batch)]
    needed = [Action(stage, Kind.FORWARD, micro_batch)]
    if stage < num_stages - 1:
        half = Action(stage + 1, Kind.BACKWARD_INPUT, micro_batch)
        needed.append(half if half in done else Action(stage + 1, Kind.BACKWARD, micro_batch))
    return needed


def live_activations(programs: Sequence[Program]) -> tuple[int, ...]:
    """Return, for each stage, the most micro-batches whose activations it holds at once.

    They are held from the forward pass until the backward pass is done, its weights' half included. The order alone
    determines the number: a stage is on one worker, which does one action at a time.
    """
    live: dict[int, int] = {}
    most: dict[int, int] = {}
    for stage, kind, _ in (action for program in programs for action in program):
        live[stage] = live.get(stage, 0) + _CHANGE[kind]
        most[stage] = max(most.get(stage, 0), live[stage])
    return tuple(most[stage] for stage in sorted(most))


def peak_bytes(program: Program, stage_bytes: Sequence[int], loss_bytes: int) -> int:
    """Return the most bytes of activations that a worker holds at once, over all of its stages.

    Args:
        program: actions of the worker.
        stage_bytes: bytes that each stage of the pipeline keeps of a micro-batch, until its weights have gradients.
        loss_bytes: bytes that the loss keeps of a micro-batch, until its input has a gradient.
    """
    last = len(stage_bytes) - 1
    changes = {kind: [change * each for each in stage_bytes] for kind, change in _CHANGE.items()}
    for kind, change in _LOSS_CHANGE.items():
        changes[kind][last] += change * loss_bytes
    return max(accumulate((changes[kind][stage] for stage, kind, _ in program), initial=0))


_CHANGE = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_INPUT: 0, Kind.BACKWARD_WEIGHT: -1}
_LOSS_CHANGE = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_INPUT: -1, Kind.BACKWARD_WEIGHT: 0}


class Staleness(NamedTuple):
    """The staleness of weights that change after every backward pass, without a flush (PipeDream)."""

    updates: tuple[tuple[int, ...], ...]
    """Number of updates between a micro-batch's forward pass and its own update, for each stage and micro-batch."""
    versions_held: tuple[int, ...]
    """Most versions of its weights that each stage holds at once, the newest included. The backward pass of each
    micro-batch uses the version of its forward pass.
    """


def staleness(programs: Sequence[Program]) -> Staleness:
    """Return how old weights are when their gradients come, if each update follows its gradient at once.

    In the steady state of `pipedream`, stage k of K has staleness K - 1 - k and holds K - k versions. Narayanan et al.,
    PipeDream (SOSP 2019), section 3.3.
    """
    updates: dict[int, dict[int, int]] = {}
    held: dict[int, int] = {}
    version: dict[int, int] = {}
    in_use: dict[int, dict[int, int]] = {}
    for stage, kind, micro_batch in (action for program in programs for action in program):
        of_stage = in_use.setdefault(stage, {})
        newest = version.setdefault(stage, 0)
        if kind is Kind.FORWARD:
            of_stage[micro_batch] = newest
        elif kind is not Kind.BACKWARD_INPUT:
            updates.setdefault(stage, {})[micro_batch] = newest - of_stage.pop(micro_batch)
            version[stage] = newest + 1
        held[stage] = max(held.get(stage, 1), len({*of_stage.values(), version[stage]}))
    stages = sorted(held)
    return Staleness(
        tuple(tuple(ages for _, ages in sorted(updates.get(stage, {}).items())) for stage in stages),
        tuple(held[stage] for stage in stages),
    )


_Ready = dict[int, float]
"""Maps each micro-batch to the time at which it is ready."""


def _run(
    programs: Sequence[Program],
    seconds: Mapping[Kind, Sequence[float]],
    hops_s: Sequence[float],
    arrivals: _Ready,
) -> Simulated:
    """Run each worker until it waits for another, in turn, until all are done; raise if none can go on.

    The end of an action makes others ready: a forward pass that of the next stage, or at the last one the way back; a
    backward pass, or its half for the input, that of the stage before, and this half the one for the weights. When a
    micro-batch is on its way back, all of its forward passes are done.
    """
    inputs: list[_Ready] = [arrivals, *({} for _ in hops_s)]
    gradients: list[_Ready] = [{} for _ in inputs]
    halves: list[_Ready] = [{} for _ in inputs]
    unused: _Ready = {}
    ahead_s, back_s = [*hops_s, 0], [0, *hops_s]
    after_ahead, after_back = [*inputs[1:], gradients[-1]], [unused, *gradients[:-1]]
    # For each stage: when a micro-batch is ready, how long it takes, what is ready next, and how much later.
    rules: dict[Kind, list[tuple[_Ready, float, _Ready, float]]] = {
        Kind.FORWARD: [*zip(inputs, seconds[Kind.FORWARD], after_ahead, ahead_s, strict=True)],
        Kind.BACKWARD: [*zip(gradients, seconds[Kind.BACKWARD], after_back, back_s, strict=True)],
        Kind.BACKWARD_INPUT: [*zip(gradients, seconds[Kind.BACKWARD_INPUT], after_back, back_s, strict=True)],
        Kind.BACKWARD_WEIGHT: [
            (half, each, unused, 0) for half, each in zip(halves, seconds[Kind.BACKWARD_WEIGHT], strict=True)
        ],
    }
    begins_s: list[list[float]] = [[] for _ in programs]
    ends_s: list[list[float]] = [[] for _ in programs]
    rest = [iter(program) for program in programs]
    waiting: dict[int, list[Action]] = {worker: [] for worker in range(len(programs))}
    resumed: dict[int, list[Action]] = {}
    half = Kind.BACKWARD_INPUT
    while waiting:
        waiting, resumed = {}, waiting
        for worker, first in resumed.items():
            begins, ends = begins_s[worker], ends_s[worker]
            free_s = ends[-1] if ends else -inf
            for action in chain(first, rest[worker]):
                stage, kind, micro_batch = action
                ready_s, lasts_s, next_s, hop_s = rules[kind][stage]
                at_s = ready_s.get(micro_batch)
                if at_s is None:
                    waiting[worker] = [action]
                    break
                begin_s = free_s if free_s > at_s else at_s  # noqa: FURB136 - `max` takes longer than all else here
                free_s = begin_s + lasts_s
                begins.append(begin_s)
                ends.append(free_s)
                next_s[micro_batch] = free_s + hop_s
                if kind is half:
                    halves[stage][micro_batch] = free_s
        if waiting and waiting == resumed:
            names = ", ".join(f"worker {worker} at {action}" for worker, (action,) in waiting.items())
            raise DeadlockError(f"the programs wait for one another: {names}")
    return Simulated(programs, begins_s, ends_s)


def _durations(
    num_stages: int, forward_s: Seconds, backward_s: Seconds, input_s: Seconds | None, weight_s: Seconds | None
) -> dict[Kind, Sequence[float]]:
    def each(seconds: Seconds) -> Sequence[float]:
        found = seconds if isinstance(seconds, Sequence) else [seconds] * num_stages
        if len(found) != num_stages:
            raise ValueError(f"there are {num_stages} stages, but times of {len(found)}")
        return found

    backward = each(backward_s)
    half = [seconds / 2 for seconds in backward]
    return {
        Kind.FORWARD: each(forward_s),
        Kind.BACKWARD: backward,
        Kind.BACKWARD_INPUT: half if input_s is None else each(input_s),
        Kind.BACKWARD_WEIGHT: half if weight_s is None else each(weight_s),
    }


def _check(programs: Sequence[Program], placement: Sequence[Sequence[int]], worker_of: Mapping[int, int]) -> None:
    if sorted(stage for stages in placement for stage in stages) != list(range(len(worker_of))):
        raise ValueError(f"every stage of 0, 1, ... must be on exactly one worker, got {list(placement)}")
    if len(programs) != len(placement):
        raise ValueError(f"there are {len(placement)} workers, but programs of {len(programs)}")
    for worker, (program, stages) in enumerate(zip(programs, placement, strict=True)):
        if not {action.stage for action in program} <= {*stages}:
            wrong = next(action for action in program if action.stage not in stages)
            raise ValueError(f"worker {worker} is to do {wrong}, but does not hold stage {wrong.stage}")
