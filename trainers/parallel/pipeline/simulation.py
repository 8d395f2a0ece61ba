"""A simulation of programs in virtual time: when each action begins and ends, who waits, what is held. It uses no
threads and no clock.

Times may be Fractions as well as floats, and then stay exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
    workers: tuple[tuple[Timed, ...], ...]
    """Actions of each worker, in order."""

    @cached_property
    def times(self) -> Mapping[Action, Timed]:
        return {timed.action: timed for actions in self.workers for timed in actions}

    @property
    def num_workers(self) -> int:
        return len(self.workers)

    @cached_property
    def span_s(self) -> float:
        """Seconds from the begin of the first action to the end of the last."""
        times = self.times.values()
        return max(timed.end_s for timed in times) - min(timed.begin_s for timed in times)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds that each worker spends in its actions."""
        return tuple(sum(timed.end_s - timed.begin_s for timed in actions) for actions in self.workers)

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
    done: dict[Action, Timed] = {}

    def ready_s(action: Action) -> float | None:
        """Return the time at which all inputs of the action are there; None if it is not known yet."""
        is_first = action.kind is Kind.FORWARD and action.stage == 0
        at_s: float = arrivals[action.micro_batch] if is_first and arrivals is not None else 0
        for needed in needs(action, num_stages, done):
            if needed not in done:
                return None
            is_near = worker_of[needed.stage] == worker_of[action.stage]
            at_s = max(at_s, done[needed].end_s if is_near else done[needed].end_s + transfer_s)
        return at_s

    return Simulated(programs, _run(programs, ready_s, seconds, done))


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
    held = most = 0
    last = len(stage_bytes) - 1
    for stage, kind, _ in program:
        held += _CHANGE[kind] * stage_bytes[stage]
        if stage == last:
            held += _LOSS_CHANGE[kind] * loss_bytes
        most = max(most, held)
    return most


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


def _run(
    programs: Sequence[Program],
    ready_s: Callable[[Action], float | None],
    seconds: Mapping[Kind, Sequence[float]],
    done: dict[Action, Timed],
) -> tuple[tuple[Timed, ...], ...]:
    """Run each worker until it waits for another, in turn, until all are done; raise if none can go on."""
    times: list[list[Timed]] = [[] for _ in programs]
    unfinished = [worker for worker, program in enumerate(programs) if program]
    while unfinished:
        num_done = len(done)
        for worker in unfinished:
            program, own = programs[worker], times[worker]
            while len(own) < len(program):
                action = program[len(own)]
                at_s = ready_s(action)
                if at_s is None:
                    break
                begin_s = max(at_s, own[-1].end_s) if own else at_s
                timed = Timed(worker, action, begin_s, begin_s + seconds[action.kind][action.stage])
                own.append(timed)
                done[action] = timed
        unfinished = [worker for worker in unfinished if len(times[worker]) < len(programs[worker])]
        if len(done) == num_done:
            waiting = ", ".join(f"worker {worker} at {programs[worker][len(times[worker])]}" for worker in unfinished)
            raise DeadlockError(f"the programs wait for one another: {waiting}")
    return tuple(tuple(own) for own in times)


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
    for worker, program in enumerate(programs):
        for action in program:
            if worker_of.get(action.stage) != worker:
                raise ValueError(f"worker {worker} is to do {action}, but does not hold stage {action.stage}")
