"""The `strategy.exchange` section: how the replicas agree on the parameters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from orchestray.platform.config.base import AboveZero, AtLeastZero, Count, Flag, Positive, Section, ZeroToOne, type_or
from orchestray.platform.config.optimizers import Optimizer

Algorithm = Literal["native", "tree", "butterfly", "ring", "rabenseifner", "auto"]


class AllReduce(Section):
    """The replicas sum their gradients at every step, while the backward pass is still running."""

    type: Literal["allreduce"] = "allreduce"
    """The exchange `allreduce`."""
    algorithm: Algorithm = "native"
    """Whose all-reduce: the process group's own (`native`: gloo, NCCL), one of the four of the survey, or the one that
    is measured to be fastest for the size (`auto`)."""
    shard: Literal["none", "optimizer", "gradients", "parameters"] = "none"
    """What is spread over the replicas in place of being kept by each: the optimizer's state, the gradients too, or the
    parameters as well (ZeRO 1, 2 and 3)."""
    bucket_mb: AboveZero = 25.0
    """Megabytes of gradient that are sent at once."""
    overlap: Flag = True
    """Send while the backward pass runs; false: after it. Both give the same bits."""
    factors: Literal["never", "auto", "always"] = "never"
    """Whether fully connected layers send the inputs and errors their gradient is made of in place of the gradient:
    `auto` where that is less."""


class ParameterServer(Section):
    """Workers send gradients to servers, which hold the parameters and update them."""

    type: Literal["parameter_server"]
    """The exchange `parameter_server`."""
    consistency: Literal["synchronous", "stale", "asynchronous"] = "synchronous"
    """Whether workers wait for each other at every step, only when one is too far ahead, or never."""
    staleness: Count | None = None
    """With `stale`: how many steps the fastest worker may be ahead of the slowest."""
    shards: Positive = 1
    """Servers the parameters are spread over."""
    replicas: Positive = 1
    """Copies of each of them; with 2 or more the loss of one loses nothing."""
    groups: Positive = 1
    """Leaf servers between the workers and the shards; 1: none."""
    push_every: Positive = 1
    """Shares whose gradients a worker adds up before it sends them."""
    fetch_every: Positive = 1
    """Shares a worker computes before it asks for the parameters again."""
    backup_workers: Count = 0
    """Workers that repeat what the slowest are computing: the first answer counts."""
    balance: Literal["even", "speed"] = "even"
    """Whether the shares of a batch are of one size, or follow the speeds that are measured of the workers, so that all
    take the same time (`synchronous` and `stale`; `asynchronous` workers take as many as they can anyway)."""
    transport: Literal["channel", "shared_memory"] = "channel"
    """How: messages; or, on one node, updates without locks on the same memory (HOGWILD)."""
    lr_scale: Literal["none", "inverse_staleness"] = "none"
    """Whether an update that comes late moves the weights less: by 1 / (1 + its staleness)."""
    rates: Literal["coupled", "decoupled"] = "coupled"
    """Whether the servers apply each gradient at the learning rate (`coupled`), or workers make steps at that rate
    themselves and the servers take the mean of those made from the same weights, at `global_lr` (`decoupled`)."""
    global_lr: AboveZero = 1.0
    """With `rates: decoupled`: what the servers multiply the workers' mean step by."""
    overlap: Flag = False
    """Compute the next share while the last one is under way; adds one to the staleness of each."""
    significance: AtLeastZero = 0.0
    """With `groups`: only changes of at least this part of a parameter's value cross to the other groups."""
    persist: Flag = False
    """Write each acknowledged update to disk before it is acknowledged."""


class Edges(Section):
    """A graph of one's own."""

    edges: tuple[tuple[Count, Count], ...]
    """Pairs of workers that talk to each other, by rank."""


class Gossip(Section):
    """After every step each replica averages its parameters with those of a few others."""

    type: Literal["gossip"]
    """The exchange `gossip`."""
    peers: Positive = 1
    """Others that a replica talks to in a step, on the `random` graph."""
    graph: Literal["random", "ring", "complete"] | Edges = "random"
    """Who may talk to whom."""
    mixing: Literal["symmetric", "push_sum"] = "symmetric"
    """Both of a pair take the mean; or each sends a part of its weight one way (push-sum)."""
    consensus_step_size: Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0, le=1)] | None = None
    """Part of the way to the mean that is gone in a step; null: all of it, or with `compression` what suits that."""


class Averaging(Section):
    """Each replica trains alone, and now and then all take the mean (local SGD; DiLoCo with an outer optimizer)."""

    type: Literal["averaging"]
    """The exchange `averaging`."""
    every: Positive | Literal["end"]
    """Steps between two averages; or once, at the `end`."""
    outer_optimizer: Optimizer | None = None
    """Takes the mean's move as a gradient; null: the mean itself is taken."""


class ElasticAveraging(Section):
    """Each replica trains alone, pulled now and then towards a centre that is pulled towards all of them."""

    type: Literal["elastic_averaging"]
    """The exchange `elastic_averaging`."""
    every: Positive = 1
    """Steps between two pulls."""
    alpha: ZeroToOne | None = None
    """Part of the distance that is moved; null: 0.9 / the number of replicas."""
    consistency: Literal["synchronous", "asynchronous"] = "synchronous"
    """Whether all replicas pull at the same step, or each when it comes to it."""


class Independent(Section):
    """The replicas never talk: an ensemble."""

    type: Literal["independent"]
    """The exchange `independent`."""
    average: Literal["outputs", "probabilities"] = "outputs"
    """What the trained ensemble answers with the mean of: its members' outputs, or their softmax."""
    trunk: Count = 0
    """First layers that the members share (TreeNets)."""
    members: tuple[dict[str, Any], ...] = ()
    """What each member has of its own, as dotted keys of the config ({train.optimizer.lr: 0.05}); empty: they differ by
    their seeds alone."""


Exchange = Annotated[
    Annotated[AllReduce, Tag("allreduce")]
    | Annotated[ParameterServer, Tag("parameter_server")]
    | Annotated[Gossip, Tag("gossip")]
    | Annotated[Averaging, Tag("averaging")]
    | Annotated[ElasticAveraging, Tag("elastic_averaging")]
    | Annotated[Independent, Tag("independent")],
    type_or("allreduce"),
]
