"""Training in segments of steps, at whose ends the workers agree.

For networks that update while micro-batches of later steps are under way (PipeDream), and for replicas that update
models of their own. Between two ends nobody waits for anybody beyond what the micro-batches or the scheme bring, so
losses, wishes to stop and bytes are told at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from orchestray.trainers.faults import Faults
from orchestray.trainers.replica import agreement
from orchestray.trainers.replica.clipping import clip, clip_pieces
from orchestray.trainers.schedules import lr_at

if TYPE_CHECKING:
    from orchestray.platform.collective import Collective
    from orchestray.platform.data.stream import Share
    from orchestray.trainers.exchange.diverging import Diverging
    from orchestray.trainers.layout.groups import Groups
    from orchestray.trainers.network.base import Network
    from orchestray.trainers.optimizers import Optimizer
    from orchestray.trainers.pipeline.pipedream import PipeDreamNetwork
    from orchestray.trainers.replica.randomness import Draw
    from orchestray.trainers.replica.settings import ReplicaSettings

MOST_STEPS = 16
"""Of a segment: so long a request to stop may wait."""


@dataclass(frozen=True)
class DoneStep:
    """A step all workers have done."""

    step: int
    loss: float
    staleness: list[int]
    """Of each update of each stage and replica in the step."""
    done_at_s: float
    """Wall-clock time."""
    batch_samples: int
    told: dict[str, float] = field(default_factory=dict)
    """What the scheme has to say of it."""


@dataclass(frozen=True)
class Told:
    """What one worker tells at the end of a segment."""

    stop: bool
    """Whether it was asked to stop."""
    late: bool
    """Whether it is out of time."""
    sent_bytes: int
    """Since it told last."""
    saved_bytes: int
    """By compression, in the segment."""


@dataclass(frozen=True)
class Segment:
    """What the workers told at its end; the same on each."""

    steps: list[DoneStep]
    stop: float
    late: float
    bytes_sent: int
    bytes_saved: int
    """By compression."""


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
    tell: Callable[[], Told],
) -> Segment:
    """Train on the next shares and empty the pipeline. All workers call.

    Args:
        network: of this worker.
        optimizer: of its stage.
        settings: of the run.
        world: all workers.
        shares: of this replica; `num_steps` are taken.
        first_step: the step of the first of them.
        num_steps: of the segment.
        total_steps: of the run, for the learning rate.
        tell: called at the end.
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
    told = agreement.gather_json(world, {"done": done, **asdict(tell())})
    steps = []
    for index, batch_samples in enumerate(samples):
        rows = [worker["done"][index] for worker in told]
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
        stop=sum(float(worker["stop"]) for worker in told),
        late=sum(float(worker["late"]) for worker in told),
        bytes_sent=sum(int(worker["sent_bytes"]) for worker in told),
        bytes_saved=sum(int(worker["saved_bytes"]) for worker in told),
    )


def run_alone(
    network: Network,
    exchange: Diverging,
    optimizer: Optimizer,
    settings: ReplicaSettings,
    groups: Groups,
    draw: Draw,
    shares: Iterator[Share],
    *,
    first_step: int,
    num_steps: int,
    total_steps: int,
    tell: Callable[[], Told],
    faults: Faults | None = None,
) -> Segment:
    """Train a model of this replica's own on the next shares, meeting the others when the scheme says so.

    All workers call; arguments as of `run_segment`, and:

    Args:
        exchange: the scheme.
        groups: this worker's groups.
        draw: what random numbers depend on.
        faults: what goes wrong on purpose.
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
        told: dict[str, float] = {}
        if settings.grad_clip is not None and groups.model.size == 1:
            told["grad_norm"] = clip(gradients, settings.grad_clip)
        elif settings.grad_clip is not None:
            told["grad_norm"] = clip_pieces(updates, gradients, settings.grad_clip, groups.model)
        lr = lr_at(settings.lr_schedule, settings.optimizer["lr"], step, total_steps)
        optimizer.step([update.tensor for update in updates], gradients, lr)
        exchange.after_step(step)
        told |= exchange.report()
        steps.append(DoneStep(step, 0.0, [], time.time(), share.batch_samples, told))
    said = tell()
    saved = [said.saved_bytes] if settings.compression.get("type", "none") != "none" else []
    sums = torch.tensor([said.stop, said.late, said.sent_bytes, *saved, *losses], dtype=torch.float64)
    groups.world.all_reduce(sums)
    stopped, late_ones, sent_by_all, *rest = sums.tolist()
    saved_by_all, losses = (rest[0], rest[1:]) if saved else (0, rest)
    copies = 1 if exchange.shares_batch else groups.data.size
    done = [replace(step, loss=loss / copies) for step, loss in zip(steps, losses, strict=True)]
    return Segment(done, stopped, late_ones, int(sent_by_all), int(saved_by_all))
