"""The loss of a batch that several workers compute: its weight, and the check that it is a mean over samples."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from orchestray.platform.comm import objects
from orchestray.platform.data.nested import copied
from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.platform.task import asked_by
from orchestray.trainers.core.buffers import BufferCopies, untouched

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from orchestray.platform.data.stream import SampleStream, Share
    from orchestray.platform.task import Task
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.core.network import Network
    from orchestray.trainers.loop.replica import Replica

_TOLERANCE = {"float32": 1e-5, "float64": 1e-10, "bfloat16": 1e-2}
"""Relative difference of two ways to sum the same loss, by precision: rounding is a tenth of it or less."""


def weighed(replica: Replica, share: Share, *, step: int) -> Share:
    """Return a share that knows the weight of the whole batch, for a task that weighs its losses. All replicas call.

    The weight is known before the gradients are sent: what is compressed or combined on the way is then each replica's
    part of the batch's gradient. A replica that has a model of its own knows the weight of its own share alone, which
    counts as much as its samples.

    Raises:
        TrainingError: the batch has weight 0, so it has no loss.
    """
    if replica.exchange.diverges:
        own = share.weight * share.batch_samples / max(1, share.num_samples)
        return replace(share, batch_weight=own or 1.0)
    total = torch.tensor(float(share.weight), dtype=torch.float64)
    replica.groups.data.sibling("weight").all_reduce(total)
    if not total:
        raise TrainingError(
            f"The batch of step {step} has weight 0 by the task's weight(batch): none of its samples counts, so it has "
            "no loss. Drop such samples from the data, or raise train.batch_size."
        )
    return replace(share, batch_weight=float(total))


def has_weight(task: Task) -> bool:
    """Return True if a task says what its loss is divided by."""
    return callable(getattr(task, "weight", None))


def is_to_be_checked(task: Task, settings: ReplicaSettings) -> bool:
    """Return True if a run cuts batches, and its loss is said to be a mean over samples."""
    is_cut = settings.num_replicas * settings.accumulate > 1
    return is_cut and settings.loss_is == "mean" and "gather" not in asked_by(task)


def checked(replica: Replica, shares: Iterator[Share]) -> Iterator[Share]:
    """Hold the loss of the first samples against the mean of their parts', and return the same shares.

    A model in evaluation mode is asked for both. A loss that draws random numbers cannot be checked so, and is not.
    Every worker calls.

    Raises:
        TrainingError: they differ, so the result would depend on how batches are cut.
    """
    share = next(shares)
    with replica.evaluating(), untouched(replica.model), replica.log.uncounted():
        replica.draw.step = replica.position.step + 1
        own = why_no_mean(replica.network, share, replica.settings)
        replica.network.usage()  # of the check, and so of no step
        replica.exchange.rest()
        # Those that do not see it would wait for the others; of a pipeline only one worker sees the loss.
        problems, changing = zip(*objects.gather_json(replica.world, own), strict=True)
    if (found := next(filter(None, problems), None)) and not any(changing):
        raise TrainingError(found)
    return chain([share], shares)


def why_no_mean(network: Network, share: Share, settings: ReplicaSettings) -> tuple[str | None, bool]:
    """Return the reason why a task's loss is not a mean over samples; None if it is, or is not said to be.

    The second value is True if the model changes in evaluation (observers of quantisation, say). Each pass is then one
    of another model, and the losses cannot be compared.

    Args:
        network: network in evaluation mode.
        share: share of a batch; without a `cut` this worker says nothing.
        settings: settings of the run.
    """
    if share.cut is None:
        return None, False
    whole = replace(share, micro_batches=(share.cut.whole or share.micro_batches[0],))
    in_parts = replace(share, micro_batches=share.cut.parts)
    before = BufferCopies(network.model)
    before.take()
    losses = [network.evaluate(_copied(part), loss_only=True).get("loss", 0.0) for part in (whole, whole, in_parts)]
    changes = bool(before.changed(lambda _: ()))
    if not whole.weight or losses[0] != losses[1]:
        return None, changes
    at_once, cut = losses[0] / whole.weight, losses[2] / whole.weight
    if math.isclose(at_once, cut, rel_tol=_TOLERANCE[settings.precision], abs_tol=1e-7):
        return None, changes
    text = (
        f"The task's loss is not a mean over samples: of {whole.num_samples} samples it is {at_once:.8g}, and the mean "
        f"of the losses of their {len(in_parts.micro_batches)} parts is {cut:.8g}. With several workers or "
        "micro-batches the result would depend on how batches are cut. "
    )
    return text + _advice(network.model), changes


def _advice(model: nn.Module) -> str:
    """Return what to do about a loss that is not a mean over samples."""
    layers = [name for name, each in model.named_modules() if isinstance(each, _BatchNorm) and not _has_running(each)]
    if layers:
        return (
            f"The model normalises by the batch in evaluation, too, as batch normalisation has no running statistics "
            f"({', '.join(layers[:3])}): take track_running_stats=False out of it, or train with one worker and "
            "train.accumulate: 1."
        )
    return (
        "If the loss is divided by another number than that of the samples (valid tokens, class weights), give the "
        "task a method weight(batch) that returns this number. If it compares samples with each other, have loss take "
        "`gather`, or set train.loss_is: between_samples to train on it as it is."
    )


def _has_running(layer: _BatchNorm) -> bool:
    return layer.running_mean is not None


def _copied(share: Share) -> Share:
    """Return the share with a batch of its own, as a model may change its inputs in place."""
    parts = tuple(replace(part, batch=copied(part.batch)) for part in share.micro_batches)
    return replace(share, micro_batches=parts)


def check_gather(replica: Replica, stream: SampleStream, split: str) -> None:
    """Refuse a loss that gathers the outputs of all replicas where they do not compute a batch together.

    Raises:
        ConfigError: the text says what to change.
    """
    settings = replica.settings
    if "gather" not in asked_by(replica.task) or (settings.num_replicas == 1 and settings.accumulate == 1):
        return
    reason = None
    if settings.accumulate > 1 or settings.layout.pipeline > 1:
        reason = "sees the whole batch at once, so train.accumulate and strategy.network.pipeline must be 1"
    elif replica.exchange.diverges:
        reason = "needs all replicas at every step, so strategy.exchange.type must be allreduce"
    elif has_weight(replica.task):
        reason = (
            "compares samples of all replicas, so no share of them has a weight of its own: take weight(batch) out of "
            "the task, and let loss divide by the weight of what it has gathered"
        )
    elif settings.batch_schedule is not None and split == "train":
        reason = (
            "needs a sample on each replica, and batches that grow leave any number for the last of an epoch: take "
            "train.batch_schedule out"
        )
    elif 0 < _of_last_batch(stream) < settings.num_replicas:
        advice = "choose another train.batch_size"
        if stream.num_samples < settings.num_replicas:
            advice = "add samples, or set strategy.network.data to fewer replicas"
        elif split == "train" and stream.num_samples > stream.batch_size >= settings.num_replicas:
            advice += ", or set train.drop_last to true"
        reason = (
            f"needs a sample on each of the {settings.num_replicas} replicas, and the last batch of the {split} data "
            f"has {_of_last_batch(stream)}; {advice}"
        )
    if reason is not None:
        raise ConfigError(f"config: a loss that gathers outputs {reason}")


def _of_last_batch(stream: SampleStream) -> int:
    """Return the number of samples of an epoch's last batch, than which none has fewer; 0 without data."""
    return stream.num_samples % stream.batch_size or min(stream.num_samples, stream.batch_size)
