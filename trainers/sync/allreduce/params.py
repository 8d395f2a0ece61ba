"""The parameters of the exchange `allreduce`."""

from __future__ import annotations

from typing import ClassVar, Literal

from orchestray.platform.config.base import AboveZero, Count, Flag
from orchestray.trainers.core.exchange_params import ExchangeParams

Algorithm = Literal["native", "tree", "butterfly", "ring", "rabenseifner", "auto"]


class AllReduce(ExchangeParams):
    """The replicas sum their gradients at every step, while the backward pass is still running."""

    compresses: ClassVar[bool] = True

    type: Literal["allreduce"] = "allreduce"
    """The exchange `allreduce`."""
    algorithm: Algorithm = "native"
    """Algorithm of the all-reduce: the process group's own (`native`: gloo, NCCL), one of the four of the survey, or
    the one that is measured to be fastest for the size (`auto`). Under a compression that sends a few values
    (`topk`, `dgc`, thresholds) `butterfly` sends their indices first, and then only values (Kylix).
    """
    shard: Literal["none", "optimizer", "gradients", "parameters"] = "none"
    """State that the replicas shard instead of each keeping a copy: the optimizer's, also the gradients, or also the
    parameters (ZeRO 1, 2 and 3).
    """
    bucket_mb: AboveZero = 25.0
    """Megabytes of gradient that are sent at once."""
    overlap: Flag = True
    """True to send while the backward pass runs; false: after it. Both give the same bits."""
    factors: Literal["never", "auto", "always"] = "never"
    """Use of sufficient factors: fully connected layers send the inputs and errors that make up their gradient, instead
    of the gradient. `auto`: where that is less.
    """
    store_shards: Count = 0
    """Shards of a key-value store that as many of the replicas host, with `factors` (Poseidon): what is not sent as
    factors is pushed to the shards, and its sum pulled from them. `factors: auto` then compares with that. 0: no store.
    """
