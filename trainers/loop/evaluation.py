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
    from orchestray.trainers.loop.step_buffers import StepBuffers


def evaluate(
    network: Network,
    exchange: Exchange,
    stream: SampleStream,
    world: Collective,
    source: int,
    buffers: StepBuffers,
) -> dict[str, float]:
    """Return the means of the loss and the task's metrics over all samples of `stream`, the same on every rank.

    The model must be in evaluation mode. A metric is the mean of its micro-batch means, weighted by the numbers of
    samples. If a pass changes buffers in this mode as well, the replicas agree on them.

    Args:
        network: this worker's part of the model.
        exchange: exchange that may hold parameters which the other replicas still need.
        stream: samples of this worker's replica.
        world: all workers.
        source: first rank whose metrics count.
        buffers: the model's buffers, which were noted before.
    """
    sums: dict[str, float] = {}
    num_samples = 0
    with stream.epoch(0) as shares:
        for share in shares:
            num_samples += share.num_samples
            for name, value in network.evaluate(share).items():
                sums[name] = sums.get(name, 0.0) + value
    exchange.rest()
    # A rank without samples does not know the metrics' names. The first replica has samples if any replica has.
    names = objects.share_json(world, list(sums), source) if world.size > 1 else list(sums)
    counted = num_samples if network.is_reporting else 0
    apart = [] if exchange.diverges else [buffers.apart(trains=False)]
    own = [*apart, *(sums.get(name, 0.0) for name in names), float(counted)]
    total = torch.tensor(own, dtype=torch.float64)
    world.all_reduce(total)
    *means, count = total.tolist()
    if apart and means.pop(0):
        buffers.agree(num_samples, int(count))
    return {name: mean / count for name, mean in zip(names, means, strict=True)}
