"""Rules on compression and aggregation: the exchanges that allow each, and the number of workers that each needs."""

from __future__ import annotations

from collections.abc import Iterator

from orchestray.platform.config.problems import Problem
from orchestray.trainers.aggregation.params import Krum, Mean, MultiKrum, Robust
from orchestray.trainers.compression.params import (
    AdaptiveThreshold,
    BFloat16,
    Dgc,
    Float16,
    NoCompression,
    PowerSgd,
    Qsgd,
    TernGrad,
    Threshold,
    TopK,
)
from orchestray.trainers.config.checked_view import Rule, View
from orchestray.trainers.config.sections import Compression
from orchestray.trainers.optim.params import values_of_groups
from orchestray.trainers.sync.allreduce.params import AllReduce
from orchestray.trainers.sync.local.params import Averaging, ElasticAveraging, Gossip, Independent
from orchestray.trainers.sync.parameter_server import ParameterServer

_COMPRESSION = "strategy.compression.type"
_AGGREGATION = "strategy.aggregation.type"
_FACTORS = "factors are sent as they are, not as {}; use factors: never, or none here"
_SPARSE = TopK | Threshold | AdaptiveThreshold | Dgc
"""Compressions whose values can be added up on the way."""
_NO_RESIDUE = "float16, bfloat16, qsgd or terngrad without error_feedback"


def keeps_residue(compression: Compression) -> bool:
    """Return True if each replica keeps a residual of what it has not sent yet, and thus a state of its own."""
    if isinstance(compression, NoCompression):
        return False
    is_memoryless = isinstance(compression, Float16 | BFloat16 | Qsgd | TernGrad)
    return not is_memoryless or compression.error_feedback


def _carried(view: View) -> Iterator[Problem]:
    """Refuse a compression that does not work with the exchange."""
    exchange, compression = view("strategy.exchange"), view("strategy.compression")
    if isinstance(compression, NoCompression):
        return
    kind, text = compression.type, ""
    if isinstance(exchange, Independent):
        text = "members of an ensemble send nothing that could be compressed; use compression none"
    elif not exchange.compresses:
        text = f"{exchange.type} sends its tensors as they are, not as {kind}; use compression none"
    elif isinstance(exchange, Gossip):
        text = _no_memory(exchange, kind)
    elif isinstance(exchange, ParameterServer):
        if exchange.transport == "shared_memory":
            text = "in shared memory nothing is sent that could be compressed; use none, or transport: channel"
        elif exchange.factors != "never":
            text = _FACTORS.format(kind)
        elif exchange.backup_workers and keeps_residue(compression):
            text = (
                f"the answer of a copy that comes second is dropped, and with it what {kind} had kept for it; use "
                f"backup_workers: 0, or {_NO_RESIDUE}"
            )
    elif view("strategy.network.data") == 1:
        text = "is for what replicas send each other, and with data: 1 there is one; raise strategy.network.data"
    elif isinstance(exchange, AllReduce):
        text = _no_sum(exchange, compression)
    if text:
        yield Problem(_COMPRESSION, text)


def _no_sum(exchange: AllReduce, compression: Compression) -> str:
    """Explain why an all-reduce cannot send compressed gradients; return an empty text if it can."""
    kind = compression.type
    if exchange.shard != "none":
        return f"{kind} needs whole gradients, which shard: {exchange.shard} spreads; use shard: none, or none here"
    is_sparse = isinstance(compression, _SPARSE)
    if is_sparse and exchange.algorithm not in ("native", "auto", "butterfly"):
        return (
            f"{exchange.algorithm} sums all values, and {kind} sends a few; use algorithm: native, auto or butterfly, "
            "or none here"
        )
    if not is_sparse and exchange.algorithm not in ("native", "auto"):
        return (
            f"{exchange.algorithm} adds up on the way, and messages of {kind} do not add up; "
            "use algorithm: native or auto, or none here"
        )
    if exchange.factors != "never":
        return _FACTORS.format(kind)
    return ""


def _no_memory(exchange: Gossip, kind: str) -> str:
    """Explain why gossiping replicas cannot know what each other sent last; return an empty text if they can."""
    needs = f"gossip sends in {kind} what has changed since a replica last spoke to its neighbours, and"
    if exchange.mixing == "push_sum":
        return f"{needs} push_sum sends parts of a sum; use mixing: symmetric, or none here"
    if exchange.graph == "random":
        return f"{needs} on the random graph they are others at every step; use graph: ring or complete, or none here"
    return ""


def _gradients_only(view: View) -> Iterator[Problem]:
    """Refuse compressions that work on gradients only, with exchanges that send parameters."""
    exchange, compression = view("strategy.exchange"), view("strategy.compression")
    if not isinstance(exchange, Averaging | Gossip | ElasticAveraging):
        return
    if isinstance(compression, PowerSgd | Dgc):
        what = "sums two factors over all" if isinstance(compression, PowerSgd) else "adds a momentum to gradients"
        text = f"{compression.type} {what}, and {exchange.type} sends parameters; topk or qsgd would fit"
        yield Problem(_COMPRESSION, text)


def _step_size(view: View) -> Iterator[Problem]:
    exchange = view("strategy.exchange")
    if isinstance(exchange, Gossip) and exchange.consensus_step_size is not None and exchange.mixing == "push_sum":
        text = "push_sum has no part of a step; leave it out, or use mixing: symmetric"
        yield Problem("strategy.exchange.consensus_step_size", text)


def _dgc(view: View) -> Iterator[Problem]:
    compression, optimizer = view("strategy.compression"), view("train.optimizer")
    for place, values in values_of_groups(optimizer):
        momentum = values.get("momentum", 0.0)
        if isinstance(compression, Dgc) and momentum > 0:
            text = (
                f"dgc keeps a momentum of its own (strategy.compression.momentum: {compression.momentum:g}), and two "
                f"would multiply; use momentum: 0 here, got {momentum:g}"
            )
            yield Problem(f"{place}.momentum", text)


def _dgc_clip(view: View) -> Iterator[Problem]:
    compression, exchange, network = view("strategy.compression"), view("strategy.exchange"), view("strategy.network")
    if not isinstance(compression, Dgc) or compression.clip is None:
        return
    shards = exchange.shards if isinstance(exchange, ParameterServer) else 1
    if shards > 1 or network.tensor * network.pipeline > 1:
        parts = f"shards: {shards}, tensor: {network.tensor} and pipeline: {network.pipeline}"
        text = f"needs the norm of a whole gradient, of which parts are coded apart with {parts}"
        yield Problem("strategy.compression.clip", f"{text}; use 1 for each, or take it out")


def _pipedream(view: View) -> Iterator[Problem]:
    network, exchange = view("strategy.network"), view("strategy.exchange")
    if network.schedule != "pipedream" or network.pipeline == 1 or not isinstance(exchange, AllReduce):
        return
    reason = "pipedream's stages update after each micro-batch, each at a moment of its own"
    if not isinstance(view("strategy.compression"), NoCompression):
        yield Problem(_COMPRESSION, f"{reason}; use compression none, or another schedule")
    if not isinstance(view("strategy.aggregation"), Mean):
        yield Problem(_AGGREGATION, f"{reason}; use mean, or another schedule")


def _robust(view: View) -> Iterator[Problem]:
    """Refuse a robust aggregation where no process sees each worker's gradient separately."""
    exchange, aggregation = view("strategy.exchange"), view("strategy.aggregation")
    if isinstance(aggregation, Mean):
        return
    kind, text = aggregation.type, ""
    if isinstance(exchange, AllReduce):
        text = _not_apart(exchange, view)
    elif not isinstance(exchange, ParameterServer):
        text = f"combines gradients, and {exchange.type} does not send them; use mean, allreduce or a parameter_server"
    elif exchange.consistency != "synchronous":
        text = f"compares the gradients of one step, and {exchange.consistency} updates need not be of one"
        text += "; use consistency: synchronous, or mean"
    elif exchange.groups > 1:
        text = f"compares workers, and leaf servers send the sum of theirs; use groups: 1 with {kind}, or mean"
    elif exchange.shards > 1 and isinstance(aggregation, Krum | MultiKrum):
        text = (
            f"compares whole gradients, and with shards: {exchange.shards} each server sees a part; use shards: 1, "
            "or median or trimmed_mean"
        )
    if text:
        yield Problem(_AGGREGATION, text)


def _not_apart(exchange: AllReduce, view: View) -> str:
    """Explain why an all-reduce shows no process each worker's gradient; return an empty text if it does."""
    needs = "needs each worker's gradient by itself, and"
    if exchange.shard != "none":
        return f"{needs} shard: {exchange.shard} spreads sums of them; use shard: none, or mean"
    if exchange.algorithm != "native":
        return f"{needs} {exchange.algorithm} adds them up on the way; use algorithm: native, or mean"
    if exchange.factors != "never":
        return f"{needs} factors are added up as they come; use factors: never, or mean"
    if keeps_residue(view("strategy.compression")):
        kind = view("strategy.compression.type")
        return f"{needs} {kind} holds parts of it back; use mean, or {_NO_RESIDUE}"
    return ""


def _byzantine(view: View) -> Iterator[Problem]:
    exchange, aggregation = view("strategy.exchange"), view("strategy.aggregation")
    if not isinstance(aggregation, Robust) or not isinstance(exchange, AllReduce | ParameterServer):
        return
    kind, batch_size = view("strategy.aggregation.type"), view("train.batch_size")
    workers = view("strategy.network.data") - (exchange.backup_workers if isinstance(exchange, ParameterServer) else 0)
    extra = 3 if isinstance(aggregation, Krum | MultiKrum) else 1
    bound = 2 * aggregation.byzantine + extra
    if workers < bound:
        most = (workers - extra) // 2
        fitting = f"at most {most} would fit" if most > 0 else "raise strategy.network.data, or use mean"
        text = f"{kind} needs {bound} workers or more (2 x byzantine + {extra}) to withstand {aggregation.byzantine}"
        yield Problem("strategy.aggregation.byzantine", f"{text}, and there are {workers}; {fitting}")
    elif batch_size < bound:
        text = f"{kind} compares the gradients of {bound} workers or more, and each needs a sample, got {batch_size}"
        yield Problem("train.batch_size", text)


def _engine(view: View) -> Iterator[Problem]:
    if view("engine") != "ray_train":
        return
    exchange, compression = view("strategy.exchange"), view("strategy.compression")
    if not isinstance(exchange, AllReduce | Averaging | Gossip):
        text = f"ray_train runs allreduce, averaging and gossip; use engine: actors for {exchange.type}"
        yield Problem("engine", text)
    elif keeps_residue(compression):
        text = f"ray_train does not keep what {compression.type} has yet to send; use engine: actors, or {_NO_RESIDUE}"
        yield Problem("engine", text)


COMPRESSION_RULES: tuple[Rule, ...] = (
    _carried,
    _gradients_only,
    _step_size,
    _dgc,
    _dgc_clip,
    _pipedream,
    _robust,
    _byzantine,
    _engine,
)
