"""Rules on batches that grow, and on the measurement of the gradients' noise."""

from __future__ import annotations

from collections.abc import Iterator

from orchestray.platform.config.problems import Problem
from orchestray.trainers.config.checked_view import Rule, View
from orchestray.trainers.optim.batch_params import ByNoiseScale, ByVariance, Measured
from orchestray.trainers.optim.params import YellowFin
from orchestray.trainers.sync.allreduce.params import AllReduce
from orchestray.trainers.sync.parameter_server import ParameterServer

_SCHEDULE = "train.batch_schedule"


def _grows(view: View) -> Iterator[Problem]:
    schedule = view(_SCHEDULE)
    if schedule is None:
        return
    exchange, network, batch_size = view("strategy.exchange"), view("strategy.network"), view("train.batch_size")
    if isinstance(exchange, ParameterServer):
        text = "the coordinator cuts batches of one size into shares; use allreduce, or take it out"
        yield Problem(_SCHEDULE, f"is not there under parameter servers: {text}")
    if network.pipeline > 1:
        text = "a pipeline is made for micro-batches of one size; use strategy.network.pipeline: 1, or take it out"
        yield Problem(_SCHEDULE, text)
    if schedule.max_batch_size < batch_size:
        text = f"must be at least train.batch_size ({batch_size}), got {schedule.max_batch_size}"
        yield Problem(f"{_SCHEDULE}.max_batch_size", text)
    if view("train.drop_last"):
        text = "leaves out a number of samples that changes with the batch; set it to false, or take batch_schedule out"
        yield Problem("train.drop_last", text)
    average = view("train.average")
    if average is not None and (average.every_steps is None or average.from_epoch):
        text = "counts epochs of equal length, and batch_schedule makes them shorter; give every_steps and from_step"
        yield Problem("train.average", text)


def _length(view: View) -> Iterator[Problem]:
    """Refuse a length that nobody knows before the end."""
    schedule = view(_SCHEDULE)
    if not isinstance(schedule, ByNoiseScale | ByVariance):
        return
    if view("train.epochs") is not None:
        text = f"have an unknown number of steps with batch_schedule: {schedule.type}; give train.steps instead"
        yield Problem("train.epochs", text)


def _is_measured(view: View) -> Iterator[Problem]:
    schedule = view(_SCHEDULE)
    if view("train.noise_scale") is None and not isinstance(schedule, Measured):
        return
    path = "train.noise_scale" if view("train.noise_scale") is not None else f"{_SCHEDULE}.type"
    network, exchange = view("strategy.network"), view("strategy.exchange")
    if not isinstance(exchange, AllReduce) or exchange.shard != "none" or exchange.factors != "never":
        text = "is measured where whole gradients are summed; use allreduce with shard: none and factors: never"
        yield Problem(path, text)
    elif network.tensor > 1 or network.pipeline > 1:
        text = "is measured where each worker has the whole network; use tensor: 1 and pipeline: 1"
        yield Problem(path, text)
    elif network.data == 1 and view("train.accumulate") == 1:
        text = (
            "compares gradients of parts of a batch, and there is one part: one worker and one micro-batch; set "
            "train.accumulate to 2 or more, or strategy.network.data"
        )
        yield Problem(path, text)
    for key, known in (("compression", "none"), ("aggregation", "mean")):
        if (kind := view(f"strategy.{key}.type")) != known:
            text = f"compares gradients of parts with their sum, and {kind} changes the sum; use {key}: {known}"
            yield Problem(path, text)
    if view("train.loss_is") == "between_samples":
        text = "compares the loss of parts of a batch, and between samples it is another in each part; take it out"
        yield Problem(path, text)
    if view("train.recompute") != "none":
        text = "takes the gradient of each pass as a whole, and recomputation makes it in pieces; use recompute: none"
        yield Problem(path, text)


def _scaling(view: View) -> Iterator[Problem]:
    if view("train.lr_scaling") is not None and isinstance(view("train.optimizer"), YellowFin):
        text = "scales a rate that was chosen for another batch, and yellowfin tunes its own; take it out"
        yield Problem("train.lr_scaling", text)


BATCH_RULES: tuple[Rule, ...] = (_grows, _length, _is_measured, _scaling)
