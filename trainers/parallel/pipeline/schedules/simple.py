"""Schedules with whole backward passes: naive, GPipe, 1F1B (and PipeDream's stream of micro-batches)."""

from __future__ import annotations

from orchestray.trainers.parallel.pipeline.schedules.actions import Kind, Program, passes
from orchestray.trainers.parallel.pipeline.schedules.place import Place


def naive(place: Place, num_micro_batches: int) -> Program:
    """Keep one stage busy at a time: a micro-batch goes all the way forward and back before the next one begins."""
    program: Program = []
    ahead = [passes(stage, Kind.FORWARD, num_micro_batches) for stage in place.stages]
    back = [passes(stage, Kind.BACKWARD, num_micro_batches) for stage in reversed(place.stages)]
    for actions in zip(*ahead, *back, strict=True):
        program += actions
    return program


def gpipe(place: Place, num_micro_batches: int) -> Program:
    """Run all forward passes, then all backward passes.

    Huang et al., GPipe (NeurIPS 2019), section 2.2. With several stages a worker, this is the breadth-first order of
    Lamy-Poirier, Breadth-First Pipeline Parallelism (MLSys 2023).
    """
    forward = [action for stage in place.stages for action in passes(stage, Kind.FORWARD, num_micro_batches)]
    behind = reversed(place.stages)
    return forward + [action for stage in behind for action in passes(stage, Kind.BACKWARD, num_micro_batches)]


def one_forward_one_backward(place: Place, num_micro_batches: int) -> Program:
    """Run one forward pass for each later stage as a warm-up, then alternate one forward and one backward.

    Stage k of K holds at most K - k micro-batches, however many there are. Narayanan et al., PipeDream (SOSP 2019),
    section 3.2, without a flush; Narayanan et al. (SC 2021), section 2.2.1, with a flush after the batch.
    """
    (stage,) = place.stages
    num_warmup = min(place.num_hops, num_micro_batches)
    forward = passes(stage, Kind.FORWARD, num_micro_batches)
    backward = passes(stage, Kind.BACKWARD, num_micro_batches)
    program = forward[:num_warmup]
    for ahead, behind in zip(forward[num_warmup:], backward, strict=False):
        program += [ahead, behind]
    return program + backward[num_micro_batches - num_warmup :]
