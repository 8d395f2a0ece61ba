"""Training in segments of steps, at whose ends the workers agree.

Used by networks that update while micro-batches of later steps are in progress (PipeDream), and by replicas with models
of their own. Within a segment, workers wait only for micro-batches or for the scheme. Losses, stop requests and bytes
are exchanged at its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from orchestray.platform.comm import objects
from orchestray.trainers.core.faults import Faults
from orchestray.trainers.optim.clipping import clip, clip_pieces
from orchestray.trainers.optim.schedules import lr_at

if TYPE_CHECKING:
    from orchestray.platform.comm.collective import Collective
    from orchestray.platform.data.stream import Share
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.core.network import Network
    from orchestray.trainers.core.rng import RngKey
    from orchestray.trainers.layout.groups import Groups
    from orchestray.trainers.optim.optimizers import Optimizer
    from orchestray.trainers.parallel.pipeline.pipedream import PipeDreamNetwork
    from orchestray.trainers.sync.common.local_updates import LocalUpdates

MOST_STEPS = 16
"""Largest number of steps of a segment, and so the longest delay of a stop request."""


@dataclass(frozen=True)
class DoneStep:
    """A step that all workers have completed."""

    step: int
    loss: float
    staleness: list[int]
    """Staleness of each update of each stage and replica in the step."""
    done_at_s: float
    """Wall-clock time of the end."""
    batch_samples: int
    metrics: dict[str, float] = field(default_factory=dict)
    """Entries of the scheme for the metric line."""


@dataclass(frozen=True)
class SegmentReport:
    """The report of one worker at the end of a segment."""

    stop: bool
    """True if the worker received a stop request."""
    late: bool
    """True if the time limit has passed on this worker."""
    sent_bytes: int
    """Bytes sent since the last report."""
    saved_bytes: int
    """Bytes saved by compression in the segment."""


@dataclass(frozen=True)
class Segment:
    """The combined reports of all workers at the end of a segment; the same on each."""

    steps: list[DoneStep]
    stop: float
    late: float
    bytes_sent: int
    bytes_saved: int
    """Bytes saved by compression."""


def run_segment(
    network: PipeDreamNetwork,
    optimizer: Optimizer,
    settings: ReplicaSettings,
    world: Collective,
    shares: Iterator[Share],
    *,
    first_step: int,
    num_steps: int,
    total_steps: int,
    report: Callable[[], SegmentReport],
) -> Segment:
    """Train on the next shares and drain the pipeline. All workers call.

    Args:
        network: this worker's network.
        optimizer: optimizer of its stage.
        settings: settings of the run.
        world: all workers.
        shares: shares of this replica; `num_steps` of them are consumed.
        first_step: step of the first share.
        num_steps: steps of the segment.
        total_steps: steps of the run, for the learning rate.
        report: returns this worker's report; called at the end.

    Returns:
        The completed steps, and the sums of all workers' reports.
    """
    samples: list[int] = []

    def taken() -> Iterator[Share]:
        for share in islice(shares, num_steps):
            samples.append(share.batch_samples)
            yield share

    def update(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], step: int, _micro_batch: int) -> None:
        lr = lr_at(settings.lr_schedule, settings.optimizer["lr"], step, total_steps)
        optimizer.step(parameters, gradients, lr)

    done = [
        [step.loss_sum, step.staleness, time.time()]
        for step in network.run_segment(taken(), update, first_step=first_step)
    ]
    reports = objects.gather_json(world, {"done": done, **asdict(report())})
    steps = []
    for index, batch_samples in enumerate(samples):
        rows = [worker["done"][index] for worker in reports]
        steps.append(
            DoneStep(
                step=first_step + index,
                loss=sum(row[0] for row in rows),
                staleness=[value for row in rows for value in row[1]],
                done_at_s=max(row[2] for row in rows),
                batch_samples=batch_samples,
            )
        )
    return Segment(
        steps,
        stop=sum(float(worker["stop"]) for worker in reports),
        late=sum(float(worker["late"]) for worker in reports),
        bytes_sent=sum(int(worker["sent_bytes"]) for worker in reports),
        bytes_saved=sum(int(worker["saved_bytes"]) for worker in reports),
    )


def run_local_segment(
    network: Network,
    exchange: LocalUpdates,
    optimizer: Optimizer,
    settings: ReplicaSettings,
    groups: Groups,
    draw: RngKey,
    shares: Iterator[Share],
    *,
    first_step: int,
    num_steps: int,
    total_steps: int,
    report: Callable[[], SegmentReport],
    faults: Faults | None = None,
) -> Segment:
    """Train this replica's own model on the next shares, and exchange with other replicas when the scheme requires it.

    All workers call. Arguments and result are those of `run_segment`, and:

    Args:
        exchange: the scheme.
        groups: this worker's groups.
        draw: key of the random numbers.
        faults: faults to inject.
    """
    losses: list[float] = []
    steps: list[DoneStep] = []
    for index, share in enumerate(islice(shares, num_steps)):
        step = first_step + index
        draw.step, draw.replica = step, settings.share_of(groups.coordinate.data)
        exchange.before_step(step)
        with (faults or Faults()).during(step, network.model):
            loss_sum = network.backward(share, exchange, step=step)
        losses += exchange.finish([loss_sum])
        updates, gradients = exchange.updates(), exchange.gradients()
        network.combine(updates, gradients)
        metrics: dict[str, float] = {}
        if settings.grad_clip is not None and groups.model.size == 1:
            metrics["grad_norm"] = clip(gradients, settings.grad_clip)
        elif settings.grad_clip is not None:
            metrics["grad_norm"] = clip_pieces(updates, gradients, settings.grad_clip, groups.model)
        lr = lr_at(settings.lr_schedule, settings.optimizer["lr"], step, total_steps)
        optimizer.step([update.tensor for update in updates], gradients, lr)
        exchange.after_step(step)
        metrics |= exchange.step_metrics()
        steps.append(DoneStep(step, 0.0, [], time.time(), share.batch_samples, metrics))
    own = report()
    saved = [own.saved_bytes] if settings.compression.get("type", "none") != "none" else []
    sums = torch.tensor([own.stop, own.late, own.sent_bytes, *saved, *losses], dtype=torch.float64)
    groups.world.all_reduce(sums)
    stopped, late_ones, sent_by_all, *rest = sums.tolist()
    saved_by_all, losses = (rest[0], rest[1:]) if saved else (0, rest)
    copies = 1 if exchange.shares_batch else groups.data.size
    done = [replace(step, loss=loss / copies) for step, loss in zip(steps, losses, strict=True)]
    return Segment(done, stopped, late_ones, int(sent_by_all), int(saved_by_all))
