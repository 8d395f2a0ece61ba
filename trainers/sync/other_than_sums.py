"""The choice of schemes that send something other than the plain sum of gradients, by the sections of a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestray.trainers.core.exchange import Exchange


def other_than_sums(
    factors: str,
    compression: Mapping[str, Any],
    aggregation: Mapping[str, Any],
    seed: int,
    *,
    algorithm: str = "native",
    bucket_mb: float = 25.0,
    store_shards: int = 0,
    **_sending: Any,
) -> Exchange | None:
    """Return the scheme for synchronous replicas that compress, aggregate, or send factors; None if none is wanted.

    Args:
        factors: the key `factors` of `allreduce`: `never`, `auto` or `always`.
        compression: the `strategy.compression` section.
        aggregation: the `strategy.aggregation` section.
        seed: seed of the run.
        algorithm: the key `algorithm` of `allreduce`.
        bucket_mb: MiB that are sent at once.
        store_shards: the key `store_shards` of `allreduce`.
        _sending: other keys of `allreduce`, on sending during the backward pass; these schemes send after it.
    """
    if aggregation.get("type", "mean") != "mean":
        from orchestray.trainers.aggregation.base import make_aggregation
        from orchestray.trainers.sync.robust.gathered import Gathered

        return Gathered(make_aggregation(**aggregation), compression=compression, seed=seed, bucket_mb=bucket_mb)
    if compression.get("type", "none") == "powersgd":
        from orchestray.trainers.sync.compressed.powersgd import PowerSgd

        arguments = {key: value for key, value in compression.items() if key != "type"}
        return PowerSgd(**arguments, seed=seed)
    if compression.get("type", "none") != "none":
        from orchestray.trainers.sync.compressed.compressed_allreduce import Compressed

        return Compressed(compression, seed=seed, is_nested=algorithm == "butterfly")
    if factors != "never":
        from orchestray.trainers.sync.allreduce.sufficient_factors import Factored

        return Factored(always=factors == "always", store_shards=store_shards)
    return None
