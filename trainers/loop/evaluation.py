"""Validation over all replicas: each evaluates its share of every batch, and all workers get the same means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from orchestray.platform.comm import objects
from orchestray.platform.errors import TrainingError
from orchestray.trainers.core import task_calls
from orchestray.trainers.core.members import is_loss

if TYPE_CHECKING:
    from orchestray.platform.comm.collective import Collective
    from orchestray.platform.data.stream import SampleStream
    from orchestray.platform.task import Task
    from orchestray.trainers.core.exchange import Exchange
    from orchestray.trainers.core.network import Network
    from orchestray.trainers.loop.step_buffers import StepBuffers


def evaluate(
    network: Network,
    exchange: Exchange,
    stream: SampleStream,
    world: Collective,
    source: int,
    task: Task,
    buffers: StepBuffers | None = None,
) -> dict[str, float]:
    """Return the means of the loss and the task's metrics over all samples of `stream`, the same on every rank.

    The model must be in evaluation mode. A metric is the mean of its micro-batch means, weighted by the numbers of
    samples, or what the task makes from its totals (`final_metrics`). Losses are weighted by the task's `weight`. If a
    pass changes buffers in this mode as well, the replicas agree on them.

    Args:
        network: this worker's part of the model.
        exchange: exchange that may hold parameters which the other replicas still need.
        stream: samples of this worker's replica.
        world: all workers.
        source: first rank whose metrics count.
        task: the task, for the metrics that it makes from totals.
        buffers: the model's buffers, which were noted before; None: nobody else has any.
    """
    sums: dict[str, Any] = {}
    num_samples, weight = 0, 0.0
    with stream.epoch(0) as shares:
        for share in shares:
            num_samples += share.num_samples
            weight += share.weight
            task_calls.add(sums, network.evaluate(share))
    exchange.rest()
    totals = {name: value for name, value in sums.items() if name.startswith(task_calls.TOTAL)}
    means = {name: value for name, value in sums.items() if name not in totals}
    # A rank without samples does not know the metrics' names. The first replica has samples if any replica has.
    names = objects.share_json(world, list(means), source) if world.size > 1 else list(means)
    if means:
        task_calls.refuse_other_names(names, means)
    counted = [float(num_samples), weight] if network.is_reporting else [0.0, 0.0]
    apart = 0.0 if exchange.diverges or buffers is None else buffers.apart(trains=False)
    total = torch.tensor([apart, *(means.get(name, 0.0) for name in names), *counted], dtype=torch.float64)
    world.all_reduce(total)
    differ, *values, count, weighed = total.tolist()
    if differ and buffers is not None:
        buffers.agree(num_samples, int(count))
    if not weighed:
        raise TrainingError(
            "The validation data has weight 0 by the task's weight(batch): none of its samples counts. Validate on "
            "samples that do."
        )
    found = {name: value / (weighed if is_loss(name) else count) for name, value in zip(names, values, strict=True)}
    if not task_calls.has_totals(task):
        return found
    every: dict[str, Any] = {}
    for of_rank in task_calls.gather_totals(world, totals):
        task_calls.add(every, of_rank)
    return found | task_calls.finish(task, every)
