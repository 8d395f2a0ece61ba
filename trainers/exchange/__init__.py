"""Exchanges: how the replicas of a model agree on its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from orchestray.platform.errors import ConfigError
from orchestray.trainers.exchange.algorithmic import KNOWN, AlgorithmicAllReduce
from orchestray.trainers.exchange.allreduce import AllReduce
from orchestray.trainers.exchange.averaging import Averaging
from orchestray.trainers.exchange.base import MAX_EXTRAS, Exchange
from orchestray.trainers.exchange.compressed_averaging import CompressedAveraging
from orchestray.trainers.exchange.compressed_gossip import CompressedGossip
from orchestray.trainers.exchange.elastic import ElasticAveraging
from orchestray.trainers.exchange.fully_sharded import FullySharded
from orchestray.trainers.exchange.gossip import Gossip
from orchestray.trainers.exchange.independent import Independent
from orchestray.trainers.exchange.otherwise import other_than_sums
from orchestray.trainers.exchange.sharded import Sharded

__all__ = ["MAX_EXTRAS", "AllReduce", "Exchange", "FullySharded", "Sharded", "make_exchange"]

_BY_SHARD: dict[str, Callable[..., Exchange]] = {
    "none": AllReduce,
    "optimizer": partial(Sharded, "optimizer"),
    "gradients": partial(Sharded, "gradients"),
    "parameters": FullySharded,
}


_DIVERGING: dict[str, Callable[..., Exchange]] = {
    "averaging": Averaging,
    "elastic_averaging": ElasticAveraging,
    "gossip": Gossip,
    "independent": Independent,
}
_COMPRESSED: dict[str, Callable[..., Exchange]] = {
    "averaging": CompressedAveraging,
    "elastic_averaging": ElasticAveraging,
    "gossip": CompressedGossip,
}


def make_exchange(
    type: str = "allreduce",  # noqa: A002 - the config's key
    *,
    algorithm: str = "native",
    shard: str = "none",
    factors: str = "never",
    compression: Mapping[str, Any] | None = None,
    aggregation: Mapping[str, Any] | None = None,
    seed: int = 0,
    **arguments: Any,
) -> Exchange:
    """The exchange of a config's `strategy.exchange` section, given as keyword arguments.

    Args:
        type: the scheme; `algorithm`, `shard`, `factors` and `arguments` are its keys.
        compression: the `strategy.compression` section.
        aggregation: the `strategy.aggregation` section.
        seed: of the run.
    """
    if type in _COMPRESSED and (compression or {}).get("type", "none") != "none":
        return _COMPRESSED[type](compression=compression, **arguments, seed=seed)
    if type in _DIVERGING:
        seeds = {"seed": seed} if type == "gossip" else {}  # it draws who talks to whom
        return _DIVERGING[type](**arguments, **seeds)
    if type != "allreduce":
        raise ConfigError(f"strategy.exchange.type: {type!r} is not an exchange of this version.")
    if (other := other_than_sums(factors, compression or {}, aggregation or {}, seed, **arguments)) is not None:
        return other
    if algorithm != "native":
        if algorithm not in KNOWN:
            known = ", ".join(repr(name) for name in ("native", *KNOWN))
            raise ConfigError(f"strategy.exchange.algorithm: {algorithm!r} is not in this version; it has {known}.")
        if shard != "none":
            text = f"{algorithm} is an all-reduce, and shard: {shard} has none; use algorithm: native with it."
            raise ConfigError(f"strategy.exchange.algorithm: {text}")
        return AlgorithmicAllReduce(algorithm, **arguments)
    if shard not in _BY_SHARD:
        known = ", ".join(repr(known) for known in _BY_SHARD)
        raise ConfigError(f"strategy.exchange.shard: {shard!r} is not in this version; it has {known}.")
    if shard == "parameters":
        # Units take the place of buckets, and are sent as soon as they are there.
        arguments = {key: value for key, value in arguments.items() if key not in ("bucket_mb", "overlap")}
    return _BY_SHARD[shard](**arguments)
