"""Validation spread over the replicas: each sees its share of every batch, and all learn the same means."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from orchestray.trainers import agreement

if TYPE_CHECKING:
    from orchestray.platform.collective import Collective
    from orchestray.platform.data.stream import SampleStream
    from orchestray.trainers.forward import Forward


def evaluate(forward: Forward, stream: SampleStream, collective: Collective) -> dict[str, float]:
    """Means over all samples of `stream` of the loss and the task's metrics, the same on every rank.

    The model must be in evaluation mode. A metric is the mean over the samples of its micro-batch means, each weighted
    by its number of samples.
    """
    sums: dict[str, float] = {}
    num_samples = 0
    with stream.epoch(0) as shares:
        for share in shares:
            for micro_batch in share.micro_batches:
                num_samples += micro_batch.num_samples
                for name, value in forward.metrics(micro_batch).items():
                    sums[name] = sums.get(name, 0.0) + value * micro_batch.num_samples
    # A rank may have no sample at all and know no metric's name; the first rank has one whenever there is any.
    names = agreement.share_json(collective, list(sums), 0) if collective.size > 1 else list(sums)
    total = torch.tensor([*(sums.get(name, 0.0) for name in names), float(num_samples)], dtype=torch.float64)
    collective.all_reduce(total)
    *means, count = total.tolist()
    return {name: mean / count for name, mean in zip(names, means, strict=True)}
