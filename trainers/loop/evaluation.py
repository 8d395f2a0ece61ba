"""Validation over all replicas: each evaluates its share of every batch, and all workers get the same means."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from orchestray.platform.comm import objects

if TYPE_CHECKING:
    from orchestray.platform.comm.collective import Collective
    from orchestray.platform.data.stream import SampleStream
    from orchestray.trainers.core.exchange import Exchange
    from orchestray.trainers.core.network import Network


def evaluate(
    network: Network, exchange: Exchange, stream: SampleStream, world: Collective, source: int
) -> dict[str, float]:
    """Return the means of the loss and the task's metrics over all samples of `stream`, the same on every rank.

    The model must be in evaluation mode. A metric is the mean of its micro-batch means, weighted by the numbers of
    samples.

    Args:
        network: this worker's part of the model.
        exchange: exchange that may hold parameters which the other replicas still need.
        stream: samples of this worker's replica.
        world: all workers.
        source: first rank whose metrics count.
    """
    sums: dict[str, float] = {}
    num_samples = 0
    with stream.epoch(0) as shares:
        for share in shares:
            if network.is_reporting:
                num_samples += share.num_samples
            for name, value in network.evaluate(share).items():
                sums[name] = sums.get(name, 0.0) + value
    exchange.rest()
    # A rank without samples does not know the metrics' names. The first replica has samples if any replica has.
    names = objects.share_json(world, list(sums), source) if world.size > 1 else list(sums)
    total = torch.tensor([*(sums.get(name, 0.0) for name in names), float(num_samples)], dtype=torch.float64)
    world.all_reduce(total)
    *means, count = total.tolist()
    return {name: mean / count for name, mean in zip(names, means, strict=True)}
