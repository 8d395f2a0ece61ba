"""The step of a pipeline: measured layers, cut as the run would cut them, simulated by the run's own schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from orchestray.trainers.parallel.pipeline.balance import Bounds, balanced, by_names
from orchestray.trainers.parallel.pipeline.schedules import default_stages_per_worker, make_programs, placement
from orchestray.trainers.parallel.pipeline.simulation import peak_bytes, simulate, staleness

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
        activation_bytes: bytes that each worker keeps for the backward pass at most.
        link_bytes: bytes that one pipeline sends over its cuts.
        staleness: mean number of updates between a forward pass and its own update.
        begins: names of the layers that begin the stages after the first.
    """

    span_s: float
    busy_s: float
    parameter_bytes: tuple[int, ...]
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
    bounds = _bounds(profiles[0], settings, workers * per_worker)
    tensor = settings.layout.tensor
    boundaries = [profiles[0].boundary_bytes[stop - 1] for _, stop in bounds[:-1]]
    messages_s = [0.0, *(message_s(each) for each in boundaries), 0.0]
    # A message is copied by the cores that compute: each end of it takes them for half of its time.
    handling_s = [(before + after) / 2 + ACTION_S for before, after in pairwise(messages_s)]
    ahead_s = [_mean(profiles, "forward_s", part) / tensor for part in bounds]
    back_s = [_mean(profiles, "backward_s", part) / tensor for part in bounds]
    if settings.recompute != "none":  # once more forward, before going back
        back_s = [back + ahead for back, ahead in zip(back_s, ahead_s, strict=True)]
    forward = [seconds + own for seconds, own in zip(ahead_s, handling_s, strict=True)]
    backward = [seconds + own for seconds, own in zip(back_s, handling_s, strict=True)]
    count = settings.accumulate
    programs = make_programs(schedule, workers, per_worker, count)
    if settings.is_streaming:
        span_s, busy_s = _streamed(schedule, placed, forward, backward, settings)
        age = staleness(make_programs(schedule, workers, per_worker, count * _STREAMED_BATCHES))
        stale = fmean(value for stage in age.updates for value in stage)
    else:
        done = simulate(programs, placed, forward, backward)
        span_s, busy_s, stale = done.span_s, max(done.busy_s), 0.0
    stage_bytes = [sum(profiles[0].parameter_bytes[start:stop]) // tensor for start, stop in bounds]
    # A stage holds what the one before it sent, even if that one holds it as well.
    received = [0, *(profiles[0].received_bytes[start] for start, _ in bounds[1:])]
    kept = [
        (own + sum(profiles[0].activation_bytes[start:stop])) // tensor
        for own, (start, stop) in zip(received, bounds, strict=True)
    ]
    return PipelineStep(
        span_s,
        busy_s,
        tuple(sum(stage_bytes[stage] for stage in stages) for stages in placed),
        tuple(peak_bytes(program, kept, profiles[0].loss_bytes) for program in programs),
        2 * count * sum(boundaries),
        stale,
        tuple(profiles[0].names[start] for start, _ in bounds[1:]),
    )


def _streamed(
    schedule: str,
    placed: Sequence[Sequence[int]],
    forward: Sequence[float],
    backward: Sequence[float],
    settings: ReplicaSettings,
) -> tuple[float, float]:
    """Return the seconds of a batch in the steady state of a stream, and those that the busiest worker computes."""
    count, spans = settings.accumulate, []
    for batches in (_STREAMED_BATCHES, 2 * _STREAMED_BATCHES):
        programs = make_programs(schedule, len(placed), 1, count * batches)
        spans.append(simulate(programs, placed, forward, backward))
    first, second = spans
    return (second.span_s - first.span_s) / _STREAMED_BATCHES, max(first.busy_s) / _STREAMED_BATCHES


def _bounds(profile: LayerProfile, settings: ReplicaSettings, num_stages: int) -> Bounds:
    split, forbidden = settings.pipeline.split, profile.forbidden_cuts
    if isinstance(split, list):
        return by_names(list(profile.names), split, num_stages)
    costs = [ahead + back for ahead, back in zip(profile.forward_s, profile.backward_s, strict=True)]
    if split == "equal":
        costs = [1.0] * len(costs)
    return balanced(costs, num_stages, forbidden=forbidden)


def _mean(profiles: Sequence[LayerProfile], name: str, part: tuple[int, int]) -> float:
    return fmean(sum(getattr(profile, name)[slice(*part)]) for profile in profiles)
