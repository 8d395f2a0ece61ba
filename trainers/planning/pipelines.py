"""The step of a pipeline: measured layers, cut as the run would cut them, simulated by the run's own schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import add
from statistics import fmean
from typing import TYPE_CHECKING

from orchestray.trainers.parallel.pipeline.balance import Bounds, balanced, by_names
from orchestray.trainers.parallel.pipeline.schedules import default_stages_per_worker, make_programs, placement
from orchestray.trainers.parallel.pipeline.simulation import peak_bytes, simulate

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.planning.found import LayerProfile

ACTION_S = 150e-6
"""Seconds that a worker spends on an action beside its computation: taking what has arrived, sending, recording."""
_STREAMED_BATCHES = 6


@dataclass(frozen=True)
class PipelineStep:
    """A step of a pipeline.

    Args:
        span_s: seconds from its first action to its last.
        busy_s: seconds that the worker with most work spends in its actions.
        parameter_bytes: bytes of the parameters of each worker.
        num_parameters: number of the parameters of each worker, as tensors.
        activation_bytes: bytes that each worker keeps for the backward pass at most.
        link_bytes: bytes that one pipeline sends over its cuts.
        staleness: mean number of updates between a forward pass and its own update.
        begins: names of the layers that begin the stages after the first.
    """

    span_s: float
    busy_s: float
    parameter_bytes: tuple[int, ...]
    num_parameters: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    link_bytes: int
    staleness: float
    begins: tuple[str, ...]


def pipeline_step(
    profiles: Sequence[LayerProfile],
    settings: ReplicaSettings,
    message_s: Callable[[float], float],
) -> PipelineStep:
    """Return the predicted step of a pipeline.

    Args:
        profiles: measured layers for one micro-batch, by processes that measured at once.
        settings: settings of the run.
        message_s: function from the bytes of a message to its seconds.

    Raises:
        ConfigError: the model has too few layers.
    """
    workers, schedule = settings.layout.pipeline, settings.pipeline.schedule
    per_worker = settings.pipeline.stages_per_worker or default_stages_per_worker(schedule)
    placed = placement(schedule, workers, per_worker)
    split = settings.pipeline.split
    stages = _stages(tuple(profiles), split if isinstance(split, str) else tuple(split), workers * per_worker)
    tensor = settings.layout.tensor
    holder = {stage: worker for worker, held in enumerate(placed) for stage in held}
    sent = [
        num_bytes if holder[stage] != holder[stage + 1] else 0 for stage, num_bytes in enumerate(stages.boundary_bytes)
    ]
    messages_s = [0.0, *(message_s(each) if each else 0.0 for each in sent), 0.0]
    # A message is copied by the cores that compute: each end of it takes them for half of its time.
    handling_s = [(before + after) / 2 + ACTION_S for before, after in pairwise(messages_s)]
    ahead_s = [seconds / tensor for seconds in stages.forward_s]
    back_s = [seconds / tensor for seconds in stages.backward_s]
    if settings.recompute != "none":  # once more forward, before going back
        back_s = [back + ahead for back, ahead in zip(back_s, ahead_s, strict=True)]
    forward = [seconds + own for seconds, own in zip(ahead_s, handling_s, strict=True)]
    backward = [seconds + own for seconds, own in zip(back_s, handling_s, strict=True)]
    count = settings.accumulate
    # A stream holds no more micro-batches than there are stages ahead, however long it is.
    programs = _programs(schedule, workers, per_worker, min(count, workers) if settings.is_streaming else count)
    if settings.is_streaming:
        # In the steady state the slowest stage always computes, and the others wait for it.
        span_s = busy_s = count * max(map(add, forward, backward))
        stale = _staleness(workers, count * _STREAMED_BATCHES)
    else:
        done = simulate(programs, placed, forward, backward)
        span_s, busy_s, stale = done.span_s, max(done.busy_s), 0.0
    kept = [each // tensor for each in stages.kept_bytes]
    return PipelineStep(
        span_s,
        busy_s,
        tuple(sum(stages.parameter_bytes[stage] for stage in held) for held in placed),
        tuple(sum(stages.num_parameters[stage] for stage in held) for held in placed),
        tuple(peak_bytes(program, kept, profiles[0].loss_bytes) for program in programs),
        2 * count * sum(sent),
        stale,
        stages.cut_before,
    )


_programs = lru_cache(maxsize=128)(make_programs)
"""Many schemes have the same programs."""


def _staleness(num_workers: int, num_micro_batches: int) -> float:
    """Return the mean staleness of a stream of PipeDream: at each stage it rises to the number of the stages after it.

    See `simulation.staleness`, which counts.
    """
    total = 0
    for oldest in range(num_workers):
        rising = min(oldest, num_micro_batches)
        total += rising * (rising - 1) // 2 + (num_micro_batches - rising) * oldest
    return total / (num_workers * num_micro_batches)


@dataclass(frozen=True)
class _Stages:
    """The stages of a pipeline: mean seconds and bytes of each, for one micro-batch."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    parameter_bytes: tuple[int, ...]
    num_parameters: tuple[int, ...]
    kept_bytes: tuple[int, ...]
    boundary_bytes: tuple[int, ...]
    """Bytes that cross the cut after each stage but the last."""
    cut_before: tuple[str, ...]
    """Names of the first layers of all stages but the first."""


@lru_cache(maxsize=128)
def _stages(profiles: tuple[LayerProfile, ...], split: str | tuple[str, ...], num_stages: int) -> _Stages:
    """Return the stages of a pipeline, which schedules share.

    Args:
        profiles: measured layers, by processes that measured at once.
        split: the config's key of that name.
        num_stages: number of stages.
    """
    first = profiles[0]
    bounds = _bounds(first, split, num_stages)
    # A stage holds what the one before it sent, even if that one holds it as well.
    received = [0, *(first.received_bytes[start] for start, _ in bounds[1:])]
    return _Stages(
        tuple(fmean(sum(profile.forward_s[slice(*part)]) for profile in profiles) for part in bounds),
        tuple(fmean(sum(profile.backward_s[slice(*part)]) for profile in profiles) for part in bounds),
        tuple(sum(first.parameter_bytes[slice(*part)]) for part in bounds),
        tuple(sum(first.num_parameters[slice(*part)]) for part in bounds),
        tuple(own + sum(first.activation_bytes[slice(*part)]) for own, part in zip(received, bounds, strict=True)),
        tuple(first.boundary_bytes[stop - 1] for _, stop in bounds[:-1]),
        tuple(first.names[start] for start, _ in bounds[1:]),
    )


def _bounds(profile: LayerProfile, split: str | tuple[str, ...], num_stages: int) -> Bounds:
    if not isinstance(split, str):
        return by_names(list(profile.names), split, num_stages)
    costs = [ahead + back for ahead, back in zip(profile.forward_s, profile.backward_s, strict=True)]
    if split == "equal":
        costs = [1.0] * len(costs)
    return balanced(costs, num_stages, forbidden=profile.forbidden_cuts)
