"""The parameters of the exchange `parameter_server`; its servers and workers are in `trainers.ps`."""

from __future__ import annotations

from typing import ClassVar, Literal

from orchestray.platform.config.base import AboveZero, AtLeastZero, Count, Flag, Positive
from orchestray.trainers.core.exchange_params import ExchangeParams


class ParameterServer(ExchangeParams):
    """Workers send gradients to servers, which hold the parameters and update them."""

    compresses: ClassVar[bool] = True

    type: Literal["parameter_server"]
    """The exchange `parameter_server`."""
    consistency: Literal["synchronous", "stale", "asynchronous"] = "synchronous"
    """Consistency of the workers: they wait for each other at every step, only if one is too far ahead, or never."""
    staleness: Count | None = None
    """Largest number of steps that the fastest worker may be ahead of the slowest, with `stale`."""
    shards: Positive = 1
    """Number of servers that the parameters are spread over."""
    replicas: Positive = 1
    """Number of copies of each server; with 2 or more, the loss of one loses no data."""
    groups: Positive = 1
    """Number of leaf servers between the workers and the shards; 1: none."""
    softsync: Positive | None = None
    """Updates while each worker pushes once, n: the servers make one of every data / n gradients, with `asynchronous`
    (Rudra's n-softsync). A gradient is about n updates old. Default: each push is an update.
    """
    compute_groups: Flag = False
    """True to have the workers of a group compute with the same weights, and to make one update of the sum of their
    gradients: synchronous within a group, asynchronous between groups (Omnivore).
    """
    push_every: Positive = 1
    """Number of shares whose gradients a worker sums before it sends them."""
    fetch_every: Positive = 1
    """Number of shares that a worker computes before it fetches the parameters again."""
    backup_workers: Count = 0
    """Number of workers that repeat what the slowest are computing: the first answer counts."""
    balance: Literal["even", "speed"] = "even"
    """Size of the shares of a batch: all the same, or by the measured speeds of the workers, so that all take the same
    time (`synchronous` and `stale`; `asynchronous` workers take as many as they can anyway).
    """
    transport: Literal["channel", "shared_memory"] = "channel"
    """Transport of updates: messages; or, on one node, lock-free updates of shared memory (HOGWILD)."""
    lr_scale: Literal["none", "inverse_staleness"] = "none"
    """Scale of a late update: 1, or 1 / (1 + its staleness)."""
    rates: Literal["coupled", "decoupled"] = "coupled"
    """Learning rates: the servers apply each gradient at the learning rate (`coupled`). Or workers make steps at that
    rate themselves, and the servers apply the mean of those made from the same weights, at `global_lr` (`decoupled`;
    `stale` or `asynchronous`).
    """
    global_lr: AboveZero = 1.0
    """Factor that the servers multiply the workers' mean step by, with `rates: decoupled`."""
    overlap: Flag = False
    """True to compute the next share while the last one is in flight; adds one to the staleness of each."""
    significance: AtLeastZero = 0.0
    """Smallest change of a parameter, as a fraction of its value, that is sent to the other groups (with `groups`)."""
    significance_decay: Literal["none", "sqrt"] = "none"
    """Decay of `significance`: none, or division by the square root of the number of updates so far, with which
    asynchronous sites are proven to converge.
    """
    factors: Literal["never", "auto", "always"] = "never"
    """Use of factors: fully connected layers send inputs and errors, which the servers multiply, instead of gradients
    (Project Adam). `auto`: where that is less.
    """
    pulls: Literal["whole", "changed"] = "whole"
    """Parameters that a worker fetches: all of them; or those that have changed since it last fetched them, with their
    places, where that is less (`changed`: for sparse compressions under an optimizer without momentum).
    """
    persist: Flag = False
    """True to write each update to disk before it is acknowledged."""

    @property
    def num_leaves(self) -> int:
        """Number of leaf servers; 0: workers are clients of the shards."""
        return self.groups if self.groups > 1 or self.compute_groups else 0
