"""The parameters of the exchanges whose replicas update their own models."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from orchestray.platform.config.base import Count, Positive, Section, ZeroToOne
from orchestray.trainers.core.exchange_params import ExchangeParams
from orchestray.trainers.optim.sections import Optimizer


class Edges(Section):
    """A user-defined graph."""

    edges: tuple[tuple[Count, Count], ...]
    """Pairs of replicas that exchange with each other, by index on the data axis."""


class Gossip(ExchangeParams):
    """After every step each replica averages its parameters with those of a few others."""

    compresses: ClassVar[bool] = True
    diverges: ClassVar[bool] = True
    is_seeded: ClassVar[bool] = True

    type: Literal["gossip"]
    """The exchange `gossip`."""
    peers: Positive = 1
    """Number of other replicas that a replica exchanges with in a step, on the `random` graph."""
    graph: Literal["random", "ring", "complete"] | Edges = "random"
    """Graph of the replicas that may exchange with each other."""
    mixing: Literal["symmetric", "push_sum"] = "symmetric"
    """Mixing of parameters: both replicas of a pair take the mean, or each sends a part of its weight one way."""
    consensus_step_size: Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0, le=1)] | None = None
    """Fraction of the way to the mean taken in a step; null: all of it, or with `compression` a value that suits it."""
    consistency: Literal["synchronous", "asynchronous"] = "synchronous"
    """Consistency of the steps: a replica waits for those that it mixes with, or averages with one neighbour whatever
    that one is doing (AD-PSGD)."""


class Averaging(ExchangeParams):
    """Each replica trains alone, and now and then all take the mean (local SGD; DiLoCo with an outer optimizer)."""

    compresses: ClassVar[bool] = True
    diverges: ClassVar[bool] = True

    type: Literal["averaging"]
    """The exchange `averaging`."""
    every: Positive | Literal["end"]
    """Steps between two averages; or once, at the `end`."""
    unit: Literal["steps", "samples"] = "steps"
    """Unit of `every`: steps, or the samples that all replicas together have trained on."""
    outer_optimizer: Optimizer | None = None
    """Optimizer that applies the change of the mean as a gradient; null: the mean itself is taken."""


class ElasticAveraging(ExchangeParams):
    """Each replica trains alone, pulled now and then towards a centre that is pulled towards all of them."""

    compresses: ClassVar[bool] = True
    diverges: ClassVar[bool] = True

    type: Literal["elastic_averaging"]
    """The exchange `elastic_averaging`."""
    every: Positive = 1
    """Steps between two pulls."""
    alpha: ZeroToOne | None = None
    """Fraction of the distance that is moved; null: 0.9 / the number of replicas."""
    consistency: Literal["synchronous", "asynchronous"] = "synchronous"
    """Consistency of the pulls: all replicas pull at the same step, or each when it reaches it."""


class Independent(ExchangeParams):
    """The replicas never communicate: an ensemble."""

    diverges: ClassVar[bool] = True

    type: Literal["independent"]
    """The exchange `independent`."""
    average: Literal["outputs", "probabilities"] = "outputs"
    """Values that the trained ensemble averages for its answer: its members' outputs, or their softmax."""
    trunk: Count = 0
    """Number of first layers that the members share (TreeNets)."""
    members: tuple[dict[str, Any], ...] = ()
    """Settings of each member, as dotted keys of the config ({train.optimizer.lr: 0.05}); empty: the members differ
    only by their seeds.
    """
