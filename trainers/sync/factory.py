"""The way from a config's `strategy.exchange` section to the exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from orchestray.platform.errors import ConfigError
from orchestray.trainers.core.exchange import Exchange
from orchestray.trainers.sync.allreduce.allreduce import AllReduce
from orchestray.trainers.sync.allreduce.explicit_allreduce import KNOWN, AlgorithmicAllReduce
from orchestray.trainers.sync.compressed.compressed_averaging import CompressedAveraging
from orchestray.trainers.sync.compressed.compressed_gossip import CompressedGossip
from orchestray.trainers.sync.local.asynchronous_gossip import AsynchronousGossip
from orchestray.trainers.sync.local.elastic import ElasticAveraging
from orchestray.trainers.sync.other_than_sums import other_than_sums
from orchestray.trainers.sync.registry import EXCHANGES
from orchestray.trainers.sync.zero.fully_sharded import FullySharded
from orchestray.trainers.sync.zero.sharded import Sharded

_BY_SHARD: dict[str, Callable[..., Exchange]] = {
    "none": AllReduce,
    "optimizer": partial(Sharded, "optimizer"),
    "gradients": partial(Sharded, "gradients"),
    "parameters": FullySharded,
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
    """Return the exchange of a config's `strategy.exchange` section, whose keys are the arguments.

    Args:
        type: the scheme; `algorithm`, `shard`, `factors` and `arguments` are its keys.
        compression: the `strategy.compression` section.
        aggregation: the `strategy.aggregation` section.
        seed: seed of the run.

    Raises:
        ConfigError: the exchange, algorithm or kind of sharding is unknown, or two keys contradict each other.
    """
    if type == "gossip" and arguments.pop("consistency", "synchronous") == "asynchronous":
        return AsynchronousGossip(arguments.get("graph", "random"), seed)
    if type in _COMPRESSED and (compression or {}).get("type", "none") != "none":
        return _COMPRESSED[type](compression=compression, **arguments, seed=seed)
    if type != "allreduce":
        seeds = {"seed": seed} if EXCHANGES.params(type).is_seeded else {}
        made: Exchange = EXCHANGES.find(type)(**arguments, **seeds)
        return made
    sections = compression or {}, aggregation or {}
    if (other := other_than_sums(factors, *sections, seed, algorithm=algorithm, **arguments)) is not None:
        return other
    arguments.pop("store_shards", None)  # without factors there is none
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
        # Units replace buckets, and are sent as soon as they are complete.
        arguments = {key: value for key, value in arguments.items() if key not in ("bucket_mb", "overlap")}
    return _BY_SHARD[shard](**arguments)
