"""Rules on the exchange that need no model: gossip graphs, averaging intervals and conflicting keys."""

from __future__ import annotations

import math
from collections.abc import Iterator

from orchestray.platform.config.problems import Problem
from orchestray.trainers.aggregation.params import Mean
from orchestray.trainers.config.checked_view import Rule, View
from orchestray.trainers.config.compression_checks import keeps_residue
from orchestray.trainers.config.server_checks import SERVER_RULES
from orchestray.trainers.optim.params import Kfac, NaturalGradient, Sgd, YellowFin
from orchestray.trainers.sync.allreduce.params import AllReduce
from orchestray.trainers.sync.local.params import Averaging, Edges, ElasticAveraging, Gossip, Independent
from orchestray.trainers.sync.parameter_server import ParameterServer

_PATH = "strategy.exchange"


def _alone(view: View) -> Iterator[Problem]:
    exchange = view("strategy.exchange")
    if view("strategy.network.data") > 1 or isinstance(exchange, AllReduce | ParameterServer):
        return
    what = "an ensemble of one is a plain run" if isinstance(exchange, Independent) else "there is one replica"
    text = f"{exchange.type} is between replicas, and with data: 1 {what}; raise strategy.network.data"
    yield Problem(f"{_PATH}.type", text)


def _allreduce(view: View) -> Iterator[Problem]:
    exchange = view("strategy.exchange")
    if not isinstance(exchange, AllReduce):
        return
    if exchange.algorithm != "native" and exchange.shard != "none":
        text = (
            f"{exchange.algorithm} sums whole gradients, and shard: {exchange.shard} spreads them over the replicas; "
            "use algorithm: native, or shard: none"
        )
        yield Problem(f"{_PATH}.algorithm", text)
    yield from _store(exchange, view("strategy.network.data"))
    if exchange.factors == "never":
        return
    if exchange.shard != "none":
        text = f"each replica makes whole gradients of the factors, which shard: {exchange.shard} would spread"
        yield Problem(f"{_PATH}.factors", f"{text}; use factors: never, or shard: none")
    elif exchange.algorithm != "native":
        text = f"factors are gathered, not summed, so {exchange.algorithm} has no part in them"
        yield Problem(f"{_PATH}.factors", f"{text}; use factors: never, or algorithm: native")


def _store(exchange: AllReduce, num_replicas: int) -> Iterator[Problem]:
    if exchange.store_shards and exchange.factors == "never":
        text = "the store is for what factors leave, and none are sent; use factors: auto, or store_shards: 0"
        yield Problem(f"{_PATH}.store_shards", text)
    elif exchange.store_shards > num_replicas:
        text = f"each replica hosts one shard at most, and data: {num_replicas} has fewer than {exchange.store_shards}"
        yield Problem(f"{_PATH}.store_shards", f"{text}; lower store_shards, or raise strategy.network.data")


def _pipedream(view: View) -> Iterator[Problem]:
    network, exchange = view("strategy.network"), view("strategy.exchange")
    if network.schedule != "pipedream" or network.pipeline == 1:
        return
    reason = "pipedream's stages update after each micro-batch, each at a moment of its own"
    if not isinstance(exchange, AllReduce):
        text = f"{reason}; use allreduce, or another schedule with {exchange.type}"
        yield Problem(f"{_PATH}.type", text)
    elif exchange.algorithm != "native":
        yield Problem(f"{_PATH}.algorithm", f"{reason}; use algorithm: native, or another schedule")
    elif exchange.factors != "never":
        yield Problem(f"{_PATH}.factors", f"{reason}; use factors: never, or another schedule")


def _early_stopping(view: View) -> Iterator[Problem]:
    if isinstance(view("strategy.exchange"), ParameterServer) and view("train.early_stopping") is not None:
        text = "compares validations with each other, and parameter servers know a goal only; use train.until"
        yield Problem("train.early_stopping", text)


def _average(view: View) -> Iterator[Problem]:
    if view("train.average") is None:
        return
    exchange, network = view("strategy.exchange"), view("strategy.network")
    if isinstance(exchange, ParameterServer):
        reason = "parameter servers send the weights, and no average of them"
    elif exchange.diverges:
        reason = f"with {exchange.type} each replica has weights of its own, whose averages are not that of one model"
    elif network.schedule == "pipedream" and network.pipeline > 1:
        reason = "pipedream's stages update at moments of their own, so that there are no weights after a step"
    else:
        return
    yield Problem("train.average", f"{reason}; take it out, or average checkpoints with `orchestray runs average`")


def _buffers(view: View) -> Iterator[Problem]:
    exchange = view("strategy.exchange")
    if view("train.buffers") is None or isinstance(exchange, AllReduce):
        return
    if isinstance(exchange, ParameterServer):
        what = "the servers add up what each share has changed, weighted by samples"
    else:
        what = f"{exchange.type} has models that differ, each with buffers of its own"
    text = f"is for replicas that are the same after each step, and {what}; use allreduce, or take it out"
    yield Problem("train.buffers", text)


def _gossip(view: View) -> Iterator[Problem]:
    exchange, data = view("strategy.exchange"), view("strategy.network.data")
    if not isinstance(exchange, Gossip) or data == 1:
        return
    if exchange.graph == "random" and exchange.peers >= data:
        text = f"must be fewer than strategy.network.data ({data}), of which a replica is one itself"
        yield Problem(f"{_PATH}.peers", f"{text}, got {exchange.peers}; at most {data - 1} would fit")
    if exchange.graph != "random" and exchange.peers != 1:
        text = "says how many others a replica draws on the random graph; on this graph its neighbours are given"
        yield Problem(f"{_PATH}.peers", f"{text}, so take it out")
    if isinstance(exchange.graph, Edges):
        yield from _edges(exchange.graph.edges, data)
    if exchange.consistency == "asynchronous":
        yield from _without_waiting(view, exchange)


def _without_waiting(view: View, exchange: Gossip) -> Iterator[Problem]:
    """Refuse keys of gossip in step, where a replica averages with one neighbour at a time."""
    text = (
        "a replica that does not wait takes the mean with one neighbour; take it out, or use consistency: synchronous"
    )
    own = {"mixing": "symmetric", "consensus_step_size": None, "peers": 1}
    for key, only in own.items():
        if getattr(exchange, key) != only:
            yield Problem(f"{_PATH}.{key}", text)
    if view("strategy.compression.type") not in (None, "none"):
        yield Problem("strategy.compression", f"asynchronous gossip sends whole models; {text.partition('; ')[2]}")
    for axis in ("tensor", "pipeline"):
        if view(f"strategy.network.{axis}") not in (None, 1):
            yield Problem(
                f"strategy.network.{axis}", "the parts of a replica would mix in different orders; set it to 1"
            )
    if view("engine") == "ray_train":
        yield Problem(f"{_PATH}.consistency", "asynchronous gossip needs engine: actors")


def _edges(edges: tuple[tuple[int, int], ...], data: int) -> Iterator[Problem]:
    path = f"{_PATH}.graph.edges"
    sound = True
    seen: set[frozenset[int]] = set()
    for index, edge in enumerate(edges):
        ends, text = frozenset(edge), ""
        if max(edge) >= data:
            text = f"the replicas are 0 to {data - 1} (strategy.network.data: {data}), got {list(edge)}"
        elif len(ends) == 1:
            text = f"joins a replica to itself, got {list(edge)}; each keeps a part of its own parameters anyway"
        elif ends in seen:
            text = f"is there twice, got {list(edge)}; an edge goes both ways"
        if text:
            sound = False
            yield Problem(f"{path}.{index}", text)
        seen.add(ends)
    if sound:
        reached = _reached(seen, data)
        if len(reached) < data:
            missing = min(set(range(data)) - reached)
            text = f"must connect all {data} replicas, and nothing leads from 0 to {missing}; add [0, {missing}]"
            yield Problem(path, text)


def _reached(edges: set[frozenset[int]], data: int) -> set[int]:
    """Return the replicas that can be reached from replica 0."""
    neighbours: list[list[int]] = [[] for _ in range(data)]
    for one, other in edges:
        neighbours[one].append(other)
        neighbours[other].append(one)
    reached, ahead = {0}, [0]
    while ahead:
        new = [other for other in neighbours[ahead.pop()] if other not in reached]
        reached.update(new)
        ahead += new
    return reached


def _meetings(view: View) -> Iterator[Problem]:
    exchange, steps = view("strategy.exchange"), view("train.steps")
    if not isinstance(exchange, Averaging | ElasticAveraging) or getattr(exchange, "unit", "steps") != "steps":
        return
    if steps is not None and exchange.every != "end" and exchange.every > steps:
        fitting = f"at most {steps} would fit" + (", or end" if isinstance(exchange, Averaging) else "")
        text = f"the replicas would never meet in a run of {steps} steps (train.steps), got {exchange.every}; {fitting}"
        yield Problem(f"{_PATH}.every", text)


def _outer_optimizer(view: View) -> Iterator[Problem]:
    exchange = view("strategy.exchange")
    if not isinstance(exchange, Averaging) or exchange.outer_optimizer is None:
        return
    outer = exchange.outer_optimizer
    if exchange.every == "end":
        text = "takes a step at each meeting, and with every: end there is none; give every a number of steps"
        yield Problem(f"{_PATH}.outer_optimizer", text)
    if isinstance(outer, Sgd) and outer.nesterov and outer.momentum == 0:
        text = "needs a momentum: without one there is nothing to look ahead by"
        yield Problem(f"{_PATH}.outer_optimizer.nesterov", text)
    network = view("strategy.network")
    if isinstance(outer, YellowFin) and network.tensor * network.pipeline > 1:
        text = (
            f"yellowfin measures the norm of the whole move, of which each worker has a part with tensor: "
            f"{network.tensor} and pipeline: {network.pipeline}; use sgd, or 1 for both"
        )
        yield Problem(f"{_PATH}.outer_optimizer.type", text)
    if isinstance(outer, YellowFin) and outer.groups:
        yield Problem(f"{_PATH}.outer_optimizer.groups", "yellowfin tunes by the whole move; take them out, or use sgd")


def _curvature(view: View) -> Iterator[Problem]:
    optimizer, exchange, network = view("train.optimizer"), view("strategy.exchange"), view("strategy.network")
    if isinstance(exchange, Averaging) and isinstance(exchange.outer_optimizer, Kfac | NaturalGradient):
        text = "looks at the layers while they compute, and an outer step has no batch; use sgd"
        yield Problem(f"{_PATH}.outer_optimizer.type", f"{exchange.outer_optimizer.type} {text}")
    if not isinstance(optimizer, Kfac | NaturalGradient):
        return
    path, kind, fix = "train.optimizer.type", optimizer.type, "or another optimizer"
    if isinstance(exchange, ParameterServer):
        yield from _curvature_on_servers(view, exchange, kind)
    elif isinstance(optimizer, Kfac) and not isinstance(exchange, AllReduce):
        text = f"kfac needs the whole batch's curvature at every step, which {exchange.type} does not bring together"
        yield Problem(path, f"{text}; use allreduce, {fix}")
    elif not isinstance(exchange, AllReduce | Averaging):
        text = f"natural_gradient is for replicas that share each batch, or average, and not for {exchange.type}"
        yield Problem(path, f"{text}; use allreduce or averaging, {fix}")
    if network.pipeline > 1 and network.schedule == "pipedream":
        text = f"{kind} measures a whole batch, and pipedream's stages update after each micro-batch"
        yield Problem(path, f"{text}; use another schedule, {fix}")
    elif not exchange.diverges and keeps_residue(view("strategy.compression")):
        text = f"{kind} has no state for one replica alone, and the compression keeps what a replica has not sent"
        yield Problem(path, f"{text}; use strategy.compression.type: none, {fix}")
    elif not isinstance(view("strategy.aggregation"), Mean):
        text = f"{kind} takes the mean of all replicas' curvature, in which one that lies would count"
        yield Problem(path, f"{text}; use strategy.aggregation.type: mean, {fix}")
    yield from _values_of_the_whole(optimizer)
    measuring = getattr(optimizer, "statistics_workers", None)
    if measuring is not None and measuring > network.data:
        text = f"there are {network.data} replicas (strategy.network.data), got {measuring}; take it out for all"
        yield Problem("train.optimizer.statistics_workers", text)


def _values_of_the_whole(optimizer: Kfac | NaturalGradient) -> Iterator[Problem]:
    for index, group in enumerate(optimizer.groups):
        if others := [key for key in group.model_extra or {} if key not in ("lr", "weight_decay")]:
            text = f"{optimizer.type} has one for all parameters; groups have an lr and a weight_decay of their own"
            yield Problem(f"train.optimizer.groups.{index}.{others[0]}", text)


def _curvature_on_servers(view: View, exchange: ParameterServer, kind: str) -> Iterator[Problem]:
    path = "train.optimizer.type"
    if exchange.consistency != "synchronous":
        text = f"{kind} measures a batch at the weights of one step, and with consistency: {exchange.consistency}"
        yield Problem(path, f"{text} workers compute with older ones; use synchronous, or another optimizer")
    elif exchange.shards > 1 and getattr(view("train.optimizer"), "kl_clip", None) is not None:
        text = "needs the length of a step of all layers, and several servers each make the steps of some; use null"
        yield Problem("train.optimizer.kl_clip", f"{text}, or shards: 1 and a network that is not cut")
    elif exchange.shards > 1 and exchange.groups > 1:
        text = f"leaf servers add up what workers measure for {kind}, and send it to one server"
        yield Problem(path, f"{text}; use groups: 1 or shards: 1, or another optimizer")
    elif getattr(view("train.optimizer"), "statistics_workers", None) is not None:
        text = "chooses among replicas, and workers of parameter servers take shares as they come"
        yield Problem("train.optimizer.statistics_workers", f"{text}; take it out for all")


def _curvature_of_plain_weights(view: View) -> Iterator[Problem]:
    optimizer = view("train.optimizer")
    for key in ("quantize", "weight_norm", "init_keeps"):
        if isinstance(optimizer, Kfac | NaturalGradient) and view(f"train.{key}"):
            text = f"{optimizer.type} moves a layer's weights by each other, as they are; take this out"
            yield Problem(f"train.{key}", f"{text}, or another optimizer")


def _elastic(view: View) -> Iterator[Problem]:
    exchange, data = view("strategy.exchange"), view("strategy.network.data")
    if not isinstance(exchange, ElasticAveraging) or exchange.alpha is None:
        return
    if exchange.alpha * data > 1 + 1e-9:
        text = (
            f"the centre overshoots where alpha times strategy.network.data ({data}) is more than 1, "
            f"got {exchange.alpha:g}; at most {math.floor(1e4 / data) / 1e4:g} would fit"
        )
        yield Problem(f"{_PATH}.alpha", text)


def _trunk(view: View) -> Iterator[Problem]:
    exchange = view("strategy.exchange")
    if isinstance(exchange, Independent) and exchange.trunk and view("train.grad_clip") is not None:
        text = (
            "each member's gradient has a norm of its own, and members that scale it apart would not keep the "
            f"{exchange.trunk} layers of the trunk the same; take grad_clip out, or use trunk: 0"
        )
        yield Problem("train.grad_clip", text)


EXCHANGE_RULES: tuple[Rule, ...] = (
    _alone,
    _allreduce,
    _pipedream,
    *SERVER_RULES,
    _early_stopping,
    _average,
    _buffers,
    _gossip,
    _meetings,
    _outer_optimizer,
    _curvature,
    _curvature_of_plain_weights,
    _elastic,
    _trunk,
)
