"""The loss of a batch that several workers compute: its weight, and the check that it is a mean over samples."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from orchestray.platform.comm import objects
from orchestray.platform.data.nested import copied
from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.platform.task import asked_by
from orchestray.trainers.core.buffers import BufferCopies, untouched
from orchestray.trainers.core.rng import generator_states, without_draws

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestray.platform.data.stream import Cut, SampleStream, Share
    from orchestray.platform.task import Task
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.core.network import Network
    from orchestray.trainers.loop.replica import Replica

_TOLERANCE = {"float32": 1e-5, "float64": 1e-5, "bfloat16": 1e-2}
"""Relative difference of two ways to sum the same loss, by precision: rounding is a tenth of it or less.

In float64, too, models and losses compute parts in float32, such as a softmax.
"""


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
    with untouched(replica.model, replica.task), replica.log.uncounted():
        with replica.evaluating():
            replica.draw.step = replica.position.step + 1
            problem, changes = why_no_mean(replica.network, share, replica.settings)
        own = problem or why_dependent(replica, share), changes
        if any(parameter.grad is not None for parameter in replica.model.parameters()):
            raise TrainingError(
                "The task's loss or the model's forward calls backward(). The gradients that it leaves would be added "
                "to those of the training, and would not be weighted by a worker's share of the batch. Take the call "
                "out, or use torch.autograd.grad: the loss that is returned is differentiated by the training."
            )
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
    before = BufferCopies(network.model)
    before.take()
    apart = _apart(network, share, share.cut, settings)
    changes = bool(before.changed(lambda _: ()))
    if layer := next((name for name, each in network.model.named_modules() if _scales_by_frequency(each)), None):
        return (
            f"The layer {layer or type(network.model).__name__!r} divides its gradients by how often a row is used in "
            "the batch (scale_grad_by_freq=True). A worker or micro-batch counts its own samples alone, so the result "
            "would depend on how batches are cut. Take scale_grad_by_freq out, train with one worker and "
            "train.accumulate: 1, or set train.loss_is: between_samples to train on it as it is."
        ), changes
    if apart is None:
        return None, changes
    text = (
        f"The task's loss is not a mean over samples: {apart}. With several workers or micro-batches the result would "
        "depend on how batches are cut. "
    )
    return text + _advice(network.model), changes


def why_dependent(replica: Replica, share: Share) -> str | None:
    """Return the reason why samples of a batch depend on each other while the model trains; None if none is found.

    Batch normalisation in modules of torch spans the replicas, is said not to, or is that of a micro-batch. Models that
    draw random numbers in their own code, and those that are cut over workers, are not looked at.

    Args:
        replica: the replica, in the modes of training.
        share: share of a batch; without a `cut` this worker says nothing.
    """
    settings, model = replica.settings, replica.model
    is_one = settings.layout.model_size == 1 and not replica.exchange.diverges
    normalises = any(isinstance(layer, _BatchNorm) for layer in model.modules())
    if share.cut is None or not is_one or settings.batch_norm == "local" or normalises:
        return None
    states = generator_states()
    with without_draws(model), torch.no_grad():
        try:
            apart = _apart(replica.network, share, share.cut, settings)
        except TrainingError:  # the first step reports what fails in training
            return None
    if apart is None or not all(map(torch.equal, states, generator_states())):
        return None
    return (
        f"While the model trains, the loss of a sample depends on those beside it: {apart}. With several workers or "
        "micro-batches the result would depend on how batches are cut. If the model's code normalises by the batch, "
        "use modules of torch, such as nn.BatchNorm2d, which do so over all workers, or set train.batch_norm: local "
        "to have each normalise its share. Otherwise set train.loss_is: between_samples to train on it as it is."
    )


def _apart(network: Network, share: Share, parts: Cut, settings: ReplicaSettings) -> str | None:
    """Return the loss of samples at once and in parts, in words; None if they are alike, or not to be compared."""
    whole = replace(share, micro_batches=(parts.whole or share.micro_batches[0],))
    in_parts = replace(share, micro_batches=parts.parts)
    losses = [network.evaluate(_copied(part), loss_only=True).get("loss", 0.0) for part in (whole, in_parts, whole)]
    if not whole.weight or losses[0] != losses[2]:  # random, or by what the passes have changed
        return None
    at_once, cut = losses[0] / whole.weight, losses[1] / whole.weight
    # Weights of few bits round like the precision of that name, whatever the run's.
    is_low = any(each.dtype in (torch.bfloat16, torch.float16) for each in network.model.parameters())
    tolerance = _TOLERANCE["bfloat16" if is_low else settings.precision]
    if math.isclose(at_once, cut, rel_tol=tolerance, abs_tol=1e-7):
        return None
    return (
        f"of {whole.num_samples} samples it is {at_once:.8g}, and the mean of the losses of their "
        f"{len(in_parts.micro_batches)} parts is {cut:.8g}"
    )


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
        "`gather`, or set train.loss_is: between_samples to train on it as it is. That also trains on batches whose "
        "samples to_batch or to_training_batch mixes, or changes by what else is in the batch."
    )


def _scales_by_frequency(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.scale_grad_by_freq


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
