"""Validation over all replicas: each evaluates its share of every batch, and all workers get the same means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from orchestray.platform.comm import objects
from orchestray.platform.errors import TrainingError
from orchestray.trainers.core import task_calls

if TYPE_CHECKING:
    from orchestray.platform.comm.collective import Collective
    from orchestray.platform.data.stream import SampleStream
    from orchestray.platform.task import Task
    from orchestray.trainers.core.exchange import Exchange
    from orchestray.trainers.core.network import Network


def evaluate(
    network: Network, exchange: Exchange, stream: SampleStream, world: Collective, source: int, task: Task
) -> dict[str, float]:
    """Return the means of the loss and the task's metrics over all samples of `stream`, the same on every rank.

    The model must be in evaluation mode. A metric is the mean of its micro-batch means, weighted by the numbers of
    samples, or what the task makes from its totals (`final_metrics`). The loss is weighted by the task's `weight`.

    Args:
        network: this worker's part of the model.
        exchange: exchange that may hold parameters which the other replicas still need.
        stream: samples of this worker's replica.
        world: all workers.
        source: first rank whose metrics count.
        task: the task, for the metrics that it makes from totals.
    """
    sums: dict[str, Any] = {}
    num_samples, weight = 0, 0.0
    with stream.epoch(0) as shares:
        for share in shares:
            if network.is_reporting:
                num_samples += share.num_samples
                weight += share.weight
            task_calls.add(sums, network.evaluate(share))
    exchange.rest()
    totals = {name: value for name, value in sums.items() if name.startswith(task_calls.TOTAL)}
    means = _means({name: sums[name] for name in sums if name not in totals}, num_samples, weight, world, source)
    if not task_calls.has_totals(task):
        return means
    every: dict[str, Any] = {}
    for of_rank in task_calls.gather_totals(world, totals):
        task_calls.add(every, of_rank)
    return means | task_calls.finish(task, every)


def _means(sums: dict[str, float], num_samples: int, weight: float, world: Collective, source: int) -> dict[str, float]:
    """Return the means over all samples, the same on every rank."""
    # A rank without samples does not know the metrics' names. The first replica has samples if any replica has.
    names = objects.share_json(world, list(sums), source) if world.size > 1 else list(sums)
    own = [*(sums.get(name, 0.0) for name in names), float(num_samples), weight]
    total = torch.tensor(own, dtype=torch.float64)
    world.all_reduce(total)
    *values, count, weighed = total.tolist()
    parts = {name: weighed if name == "loss" else count for name in names}
    if not weighed:
        raise TrainingError(
            "The validation data has weight 0 by the task's weight(batch): none of its samples counts. Validate on "
            "samples that do."
        )
    return {name: value / parts[name] for name, value in zip(names, values, strict=True)}
