"""The stream of a task's samples in a run: what it trains on, or what it is validated by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from orchestray.platform.data.endless import EndlessSource
from orchestray.platform.data.stream import SampleStream
from orchestray.platform.errors import ConfigError
from orchestray.platform.task import training_batch_of

if TYPE_CHECKING:
    import torch

    from orchestray.platform.data.source import Source
    from orchestray.platform.task import Task
    from orchestray.trainers.config.settings import ReplicaSettings


def task_stream(
    task: Task,
    source: Source,
    split: str,
    settings: ReplicaSettings,
    *,
    part: int = 0,
    num_parts: int = 1,
    seed: int | None = None,
    least_batch: int = 1,
    device: torch.device | None = None,
) -> SampleStream:
    """Return the samples of a split as part `part` of `num_parts` sees them.

    Args:
        task: the task.
        source: source of the samples.
        split: "train" or "validation".
        settings: settings of the run.
        part: index of the part.
        num_parts: number of parts.
        seed: seed of the order; default: the run's.
        least_batch: smallest size of a batch.
        device: device that the batches are for; default: the CPU.

    Raises:
        ConfigError: the average of the weights needs an epoch, and the data have no end.
    """
    training = split == "train"
    if isinstance(source, EndlessSource) and settings.average is not None and settings.average["type"] == "swa":
        raise ConfigError(
            "config: train.average: swa measures batch normalisation by a pass over the training data, and these are "
            "Endless; use ema"
        )
    return SampleStream(
        source,
        task.to_batch,
        to_training_batch=training_batch_of(task) if training else None,
        batch_size=max(settings.batch_size, least_batch),
        rank=part,
        num_replicas=num_parts,
        accumulate=settings.accumulate if training else 1,
        seed=settings.seed if seed is None else seed,
        shuffle=training,
        weigh=getattr(task, "weight", None),
        drop_last=training and settings.drop_last,
        pin=Tensor.pin_memory if device is not None and device.type == "cuda" else None,
    )
