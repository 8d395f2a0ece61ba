"""Validation spread over the replicas: each sees its share of every batch, and all workers learn the same means."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from orchestray.trainers.replica import agreement

if TYPE_CHECKING:
    from orchestray.platform.collective import Collective
    from orchestray.platform.data.stream import SampleStream
    from orchestray.trainers.exchange.base import Exchange
    from orchestray.trainers.network.base import Network


def evaluate(
    network: Network, exchange: Exchange, stream: SampleStream, world: Collective, source: int
) -> dict[str, float]:
    """Means over all samples of `stream` of the loss and the task's metrics, the same on every rank.

    The model must be in evaluation mode. A metric is the mean over the samples of its micro-batch means, each weighted
    by its number of samples.

    Args:
        network: this worker's part of the model.
        exchange: which may hold parameters that the other replicas still need.
        stream: of this worker's replica.
        world: all workers.
        source: the first rank whose metrics count.
    """
    sums: dict[str, float] = {}
    num_samples = 0
    with stream.epoch(0) as shares:
        for share in shares:
            if network.is_reporting:
                num_samples += sum(micro_batch.num_samples for micro_batch in share.micro_batches)
            for name, value in network.evaluate(share).items():
                sums[name] = sums.get(name, 0.0) + value
    exchange.rest()
    # A rank may have no sample at all and know no metric's name; the first replica has one whenever there is any.
    names = agreement.share_json(world, list(sums), source) if world.size > 1 else list(sums)
    total = torch.tensor([*(sums.get(name, 0.0) for name in names), float(num_samples)], dtype=torch.float64)
    world.all_reduce(total)
    *means, count = total.tolist()
    return {name: mean / count for name, mean in zip(names, means, strict=True)}
