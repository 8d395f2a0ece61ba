"""The average of the weights as the model that a run validates and ends with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from orchestray.platform.comm import objects
from orchestray.platform.errors import ConfigError
from orchestray.trainers.core.batch_norm import sync_statistics
from orchestray.trainers.core.modes import evaluating

if TYPE_CHECKING:
    from orchestray.platform.data.stream import SampleStream
    from orchestray.trainers.loop.replica import Replica


@contextlib.contextmanager
def averaged(replica: Replica, *, measured: bool = False) -> Iterator[None]:
    """Replace the weights by their average inside the context, once there is one. Every worker calls.

    Args:
        replica: replica of this worker, which is connected.
        measured: True to measure running statistics, if the kind of average needs it.

    Raises:
        PeerLostError: another worker is gone; weights that this worker updates are restored.
    """
    average, step = replica.average, replica.position.step
    if average is None or not average.has_begun(step):
        yield
        return
    if replica.checkpoints is not None:
        replica.checkpoints.wait_copied()
    average.swap()
    try:
        _spread(replica, step)
        if measured and average.measures_statistics:
            measure_statistics(replica)
        yield
    finally:
        average.swap()
    _spread(replica, step)


def _spread(replica: Replica, step: int) -> None:
    """Have the others get what this worker has changed, where each updates a part of what all hold (ZeRO)."""
    with replica.log.uncounted():
        replica.exchange.after_step(step)


@torch.no_grad()
def measure_statistics(replica: Replica) -> None:
    """Set the running statistics of batch normalisation to those of the present weights. Every worker calls.

    The statistics are the mean over the batches of one epoch (Izmailov et al. 2018, section 3.2), as by
    `torch.optim.swa_utils.update_bn`, but without dropout and without a last batch that is short. Training goes on with
    them: it only writes running statistics.

    Raises:
        ConfigError: a batch has fewer samples than there are replicas and micro-batches.
    """
    settings, model, stream = replica.settings, replica.model, replica.stream("train")
    modules = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats and m.training]
    if not any(objects.gather_json(replica.world, bool(modules))):
        return
    samples = min(stream.batch_size, stream.num_samples)
    if samples < settings.num_replicas * settings.accumulate:
        raise ConfigError(
            f"config: train.average: swa measures batch normalisation on batches of {samples} samples, and "
            f"{settings.num_replicas} replicas x {settings.accumulate} micro-batches need a sample each; raise "
            "train.batch_size"
        )
    with replica.log.uncounted(), _measuring(model, modules):
        _pass_over(replica, stream, samples)


def _pass_over(replica: Replica, stream: SampleStream, samples: int) -> None:
    is_local = replica.settings.batch_norm == "local"
    with stream.epoch(0) as shares:
        for share in shares:
            if share.batch_samples < samples:
                continue
            replica.network.evaluate(share, loss_only=True)
            replica.exchange.rest()
            if is_local:
                sync_statistics(replica.model, replica.groups.data, share.num_samples, share.batch_samples)


@contextlib.contextmanager
def _measuring(model: nn.Module, modules: list[_BatchNorm]) -> Iterator[None]:
    """Have only the modules train inside the context, each to the mean of what it sees."""
    momenta = [module.momentum for module in modules]
    try:
        with evaluating(model):
            for module in modules:
                module.reset_running_stats()
                module.momentum = None
                module.train()
            yield
    finally:
        for module, momentum in zip(modules, momenta, strict=True):
            module.momentum = momentum
