"""Exchanges: how the replicas of a model agree on its parameters."""

from __future__ import annotations

from typing import Any, Literal, get_args

from orchestray.platform.errors import ConfigError
from orchestray.trainers.exchange.allreduce import AllReduce
from orchestray.trainers.exchange.base import MAX_EXTRAS, Exchange
from orchestray.trainers.exchange.fully_sharded import FullySharded
from orchestray.trainers.exchange.sharded import Sharded

__all__ = ["MAX_EXTRAS", "AllReduce", "Exchange", "FullySharded", "Sharded", "make_exchange"]

Shard = Literal["none", "optimizer", "gradients", "parameters"]


def make_exchange(
    type: str = "allreduce",  # noqa: A002 - the config's key
    *,
    algorithm: str = "native",
    shard: Shard = "none",
    **arguments: Any,
) -> Exchange:
    """The exchange of a config's `strategy.exchange` section, given as keyword arguments."""
    if type != "allreduce":
        raise ConfigError(f"strategy.exchange.type: {type!r} is not an exchange of this version; it has 'allreduce'.")
    if algorithm != "native":
        raise ConfigError(f"strategy.exchange.algorithm: {algorithm!r} is not in this version; it has 'native'.")
    if shard == "none":
        return AllReduce(**arguments)
    if shard == "optimizer" or shard == "gradients":
        return Sharded(shard, **arguments)
    if shard == "parameters":
        # Units take the place of buckets, and are sent as soon as they are there.
        return FullySharded(**{key: value for key, value in arguments.items() if key not in ("bucket_mb", "overlap")})
    known = ", ".join(repr(known) for known in get_args(Shard))
    raise ConfigError(f"strategy.exchange.shard: {shard!r} is not in this version; it has {known}.")
