"""Rules on the layout of a network that need no model: degrees of parallelism, batch, micro-batches, schedules."""

from __future__ import annotations

from collections.abc import Iterator

from orchestray.platform.config.problems import Problem, shown
from orchestray.trainers.config.checked_view import Rule, View
from orchestray.trainers.optim.params import Muon, Soap

_SEVERAL_STAGES = {"interleaved_1f1b": "2 or more", "zero_bubble": "1 or more", "zbv": "2", "dual_pipe_v": "2"}
"""Allowed numbers of stages per worker; all other schedules allow 1 only."""


def _micro_batches(view: View) -> Iterator[Problem]:
    micro_batches, batch_size = view("strategy.network.microbatches"), view("train.batch_size")
    if micro_batches is None:
        return
    path = "strategy.network.microbatches"
    if view("train.accumulate") > 1:
        yield Problem(path, "splits the batch, and so does train.accumulate: give one of them")
    if micro_batches > batch_size:
        yield Problem(path, f"cannot split a batch of {batch_size} (train.batch_size) into {micro_batches} parts")
    elif batch_size % micro_batches:
        fitting = ", ".join(str(n) for n in divisors_near(batch_size, micro_batches))
        text = f"must divide train.batch_size ({batch_size}) evenly, got {micro_batches}; {fitting} would fit"
        yield Problem(path, text)


def _accumulate(view: View) -> Iterator[Problem]:
    if view("strategy.network.pipeline") > 1 and view("train.accumulate") > 1:
        text = "with a pipeline the batch is split by strategy.network.microbatches; leave accumulate at 1"
        yield Problem("train.accumulate", text)


def _schedule(view: View) -> Iterator[Problem]:
    pipeline, schedule = view("strategy.network.pipeline"), view("strategy.network.schedule")
    stages = view("strategy.network.stages_per_worker")
    if pipeline == 1 or stages is None:
        return
    allowed = _SEVERAL_STAGES.get(schedule, "1")
    fits = {"1": stages == 1, "2": stages == 2, "2 or more": stages >= 2, "1 or more": True}[allowed]
    if not fits:
        text = f"the schedule {schedule} has {allowed} stage(s) a worker, got {stages}"
        yield Problem("strategy.network.stages_per_worker", text)


def _rounds(view: View) -> Iterator[Problem]:
    network = view("strategy.network")
    if network.pipeline == 1 or network.microbatches is None:
        return
    if network.schedule in ("interleaved_1f1b", "zero_bubble") and network.microbatches % network.pipeline:
        text = (
            f"the schedule {network.schedule} sends micro-batches in rounds of one a worker: give a multiple of "
            f"pipeline ({network.pipeline}), got {network.microbatches}"
        )
        yield Problem("strategy.network.microbatches", text)


def _vertical_sync(view: View) -> Iterator[Problem]:
    network = view("strategy.network")
    if network.vertical_sync and (network.schedule != "pipedream" or network.pipeline == 1):
        yield Problem("strategy.network.vertical_sync", "has a meaning with schedule: pipedream and a pipeline only")


_OF_A_PIPELINE = ("schedule", "stages_per_worker", "split")
"""Keys without meaning unless there is a pipeline; `microbatches` also splits the batch of a single worker."""


def _no_pipeline(view: View) -> Iterator[Problem]:
    """Refuse keys of a pipeline that differ from their default although `pipeline` is 1."""
    network = view("strategy.network")
    if network.pipeline > 1:
        return
    for key in _OF_A_PIPELINE:
        given = getattr(network, key)
        if given == type(network).model_fields[key].default:
            continue
        text = f"is for a pipeline, and with pipeline: 1 there is none; got {shown(given)}"
        yield Problem(f"strategy.network.{key}", f"{text}; raise strategy.network.pipeline, or take it out")


def _plan(view: View) -> Iterator[Problem]:
    network = view("strategy.network")
    if network.plan != "auto" and network.tensor == 1:
        text = f"says what `tensor` workers split; with tensor: 1 there is nothing to split, got plan: {network.plan}"
        yield Problem("strategy.network.plan", text)


def _pipedream(view: View) -> Iterator[Problem]:
    network = view("strategy.network")
    if network.schedule != "pipedream" or network.pipeline == 1:
        return
    if (shard := sharding(view)) != "none":
        text = f"pipedream keeps several versions of each stage's weights, which are not sharded; got shard: {shard}"
        yield Problem("strategy.exchange.shard", text)
    if view("train.grad_clip") is not None:
        text = "needs the norm of the whole gradient, and pipedream's stages update at different moments; take it out"
        yield Problem("train.grad_clip", text)
    if view("train.optimizer.type") == "yellowfin":
        text = "yellowfin measures the whole gradient, and pipedream's stages update at different moments; use sgd"
        yield Problem("train.optimizer.type", text)
    if network.tensor > 1 and (kind := view("train.optimizer.type")) in ("lars", "lamb", "muon", "soap"):
        text = f"{kind} looks at whole parameters, which the workers of a tensor group hold parts of; use adamw"
        yield Problem("train.optimizer.type", text)
    if view("engine") == "ray_train":
        yield Problem("engine", "ray_train runs synchronous schemes only; use engine: actors for pipedream")


def _shard(view: View) -> Iterator[Problem]:
    shard, data = sharding(view), view("strategy.network.data")
    if shard != "none" and data == 1:
        text = f"spreads the {shard} over the replicas; with data: 1 there is one. Raise strategy.network.data"
        yield Problem("strategy.exchange.shard", text)


def _shard_and_pipeline(view: View) -> Iterator[Problem]:
    if sharding(view) == "parameters" and view("strategy.network.pipeline") > 1:
        text = (
            "a pipeline's stage holds its part of the parameters already, and goes through them many times a step; "
            "use shard: gradients or optimizer with a pipeline"
        )
        yield Problem("strategy.exchange.shard", text)


def _plan_and_pipeline(view: View) -> Iterator[Problem]:
    plan = view("strategy.network.plan")
    if plan in ("spatial", "one_weird_trick") and view("strategy.network.pipeline") > 1:
        text = f"{plan} splits a part of the network as a whole, which a pipeline would cut; use pipeline: 1"
        yield Problem("strategy.network.plan", text)


def _init_keeps(view: View) -> Iterator[Problem]:
    """Refuse to keep zeros or equal values where replicas do not hold whole weights, or do not move them in step."""
    path, keeps = "train.init_keeps", view("train.init_keeps")
    if keeps is None:
        return
    if view("train.init_from") is None:
        yield Problem(path, "keeps what the weights of train.init_from have; name them, or take it out")
    network, exchange = view("strategy.network"), view("strategy.exchange.type")
    if network.tensor * network.pipeline > 1:
        text = "needs whole weights on each worker; use strategy.network.data alone"
        yield Problem(path, f"{text}, got tensor: {network.tensor} and pipeline: {network.pipeline}")
    if exchange != "allreduce":
        yield Problem(path, f"holds for replicas that move the same weights in step; use allreduce, got {exchange}")
    elif sharding(view) == "parameters":
        yield Problem(path, "needs whole weights on each worker; use shard: gradients or less, got parameters")
    optimizer = view("train.optimizer")
    if isinstance(optimizer, Muon | Soap):
        text = f"{optimizer.type} moves a layer's weights by each other; take this out, or another optimizer"
        yield Problem(path, text)
    for key in ("train.quantize", "train.weight_norm", "train.solver"):
        if view(key):
            yield Problem(path, f"holds for weights that an optimizer moves as they are; take {key} out, or init_keeps")
    if keeps == "zeros" and (kind := view("strategy.compression.type")) in ("onebit", "powersgd"):
        text = f"needs gradients of zero where weights are, and {kind} sends others; use qsgd or topk, or take this out"
        yield Problem(path, text)
    if keeps == "values" and view("strategy.compression.type") != "none":
        text = "needs the same gradient for each of the weights that share a value, and compression sends parts of it"
        yield Problem(path, f"{text}; use strategy.compression.type: none, or init_keeps: zeros")


def sharding(view: View) -> str:
    """Return the `shard` setting of an all-reduce; "none" for other exchanges."""
    exchange = view("strategy.exchange")
    return str(exchange.shard) if exchange.type == "allreduce" else "none"


def divisors_near(number: int, wanted: int) -> list[int]:
    """Return the nearest divisors of `number` below and above `wanted`, as far as they exist."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    below = [n for n in divisors if n < wanted][-1:]
    above = [n for n in divisors if n > wanted][:1]
    return below + above


NETWORK_RULES: tuple[Rule, ...] = (
    _micro_batches,
    _accumulate,
    _schedule,
    _rounds,
    _vertical_sync,
    _no_pipeline,
    _plan,
    _pipedream,
    _shard,
    _shard_and_pipeline,
    _plan_and_pipeline,
    _init_keeps,
)
