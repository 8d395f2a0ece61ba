"""Training without a pause between batches: segments of steps, at whose ends the workers agree.

For networks that update while micro-batches of later steps are under way (PipeDream). Between two ends nobody waits for
anybody beyond what the micro-batches bring, so losses, wishes to stop and bytes are told at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from torch import Tensor

from orchestray.trainers import agreement
from orchestray.trainers.schedules import lr_at

if TYPE_CHECKING:
    from orchestray.platform.collective import Collective
    from orchestray.platform.data.stream import Share
    from orchestray.trainers.optimizers import Optimizer
    from orchestray.trainers.pipeline.pipedream import PipeDreamNetwork
    from orchestray.trainers.settings import ReplicaSettings

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


@dataclass(frozen=True)
class Segment:
    """What the workers told at its end; the same on each."""

    steps: list[DoneStep]
    stop: float
    late: float
    bytes_sent: int


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
    tell: Callable[[], tuple[bool, bool, int]],
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
        tell: at the end: whether this worker was asked to stop, whether it is out of time, and the bytes it has sent.
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
    stop, late, sent = tell()
    told = agreement.gather_json(world, {"done": done, "stop": stop, "late": late, "sent": sent})
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
        bytes_sent=sum(int(worker["sent"]) for worker in told),
    )
