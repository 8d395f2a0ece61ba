"""Settings that the processes of a centralised run share, besides those of every replica."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from orchestray.platform.data.order import used_samples
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.layout.degrees import Layout
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.ps.protocol.partition import Unit
from orchestray.trainers.ps.protocol.plan import Balance, Consistency, CoordinatorSettings

MAX_AHEAD = 64
"""Number of shares that a worker which changes the parameters itself may hold; it holds this many if they are short."""


Factors = Literal["never", "auto", "always"]


@dataclass(frozen=True)
class CentralSettings:
    """Settings of the section `strategy.exchange` of type `parameter_server`."""

    consistency: Consistency = "synchronous"
    staleness: int = 0
    shards: int = 1
    replicas: int = 1
    push_every: int = 1
    fetch_every: int = 1
    backup_workers: int = 0
    balance: Balance = "even"
    scale_by_staleness: bool = False
    decouples_rates: bool = False
    """True if workers make steps of their own, and servers take the mean of their changes."""
    global_lr: float = 1.0
    """Learning rate of the servers, with `decouples_rates`."""
    overlap: bool = False
    persist: bool = False
    unit: Unit = "element"
    """Smallest part that the optimizer has to see whole, so that shards begin and end with it."""
    groups: int = 1
    """Number of leaf servers; 1: none, except with `compute_groups`."""
    softsync: int | None = None
    """Updates of each worker's round under n-softsync; None: each push is an update."""
    compute_groups: bool = False
    """True if workers of a leaf compute with the same weights, and their gradients make one update."""
    factors: Factors = "never"
    """Use of factors instead of the gradients of fully connected layers."""
    pulls_changes: bool = False
    """True if workers fetch only the parameters that have changed, where that is less."""
    in_shared_memory: bool = False
    """True if workers change the parameters themselves (HOGWILD)."""

    @classmethod
    def of(cls, settings: ReplicaSettings) -> CentralSettings:
        exchange: dict[str, Any] = settings.exchange
        return cls(
            consistency=exchange["consistency"],
            staleness=exchange["staleness"] or 0,
            shards=exchange["shards"],
            replicas=exchange["replicas"],
            push_every=exchange["push_every"],
            fetch_every=exchange["fetch_every"],
            backup_workers=exchange["backup_workers"],
            balance=exchange["balance"],
            scale_by_staleness=exchange["lr_scale"] == "inverse_staleness",
            decouples_rates=exchange["rates"] == "decoupled",
            global_lr=exchange["global_lr"],
            overlap=exchange["overlap"],
            persist=exchange["persist"],
            unit=_unit(json.dumps(settings.optimizer)) if exchange["shards"] > 1 else "element",
            groups=exchange["groups"],
            compute_groups=exchange["compute_groups"],
            softsync=exchange["softsync"],
            factors=exchange["factors"],
            pulls_changes=exchange["pulls"] == "changed",
            in_shared_memory=exchange["transport"] == "shared_memory",
        )

    @property
    def updates_are_batches(self) -> bool:
        """True if an update is that of a batch, and versions count batches; False if each push is an update."""
        return self.consistency != "asynchronous" and not self.decouples_rates

    def pushes_per_update(self, settings: ReplicaSettings) -> int:
        """Return the number of pushes from which an asynchronous server makes one update."""
        return 1 if self.softsync is None else settings.layout.data // self.softsync

    @property
    def num_leaves(self) -> int:
        """Number of leaf servers; 0: workers are clients of the shards."""
        return self.groups if self.groups > 1 or self.compute_groups else 0

    @property
    def lookahead(self) -> int:
        return MAX_AHEAD if self.in_shared_memory else self.push_every + (1 if self.overlap else 0)

    def keeps_residuals(self, settings: ReplicaSettings) -> bool:
        """Return True if servers hold copies of the state of workers' compressors (`residuals`); leaf servers pass none
        on.
        """
        return settings.has_residual and not self.num_leaves

    def coordinator_settings(
        self, settings: ReplicaSettings, num_samples: int, num_validation_samples: int, position: Mapping[str, Any]
    ) -> CoordinatorSettings:
        """Return the settings of the coordinator.

        Args:
            settings: settings of the run.
            num_samples: number of samples of the training data.
            num_validation_samples: number of samples of the validation data.
            position: fields of the `Position` to continue from; empty at the start of a run.
        """
        best = settings.best
        return CoordinatorSettings(
            num_samples=used_samples(num_samples, settings.batch_size, drop_last=settings.drop_last),
            num_validation_samples=num_validation_samples,
            batch_size=settings.batch_size,
            num_shares=max(1, settings.layout.data - self.backup_workers),
            consistency=self.consistency,
            staleness=self.staleness,
            accumulate=settings.accumulate,
            backup_workers=self.backup_workers,
            lookahead=self.lookahead,
            total_steps=settings.steps,
            epochs=settings.epochs if settings.steps is None else None,
            validate_every_steps=settings.validate_every_steps,
            checkpoint_every_steps=settings.checkpoint_every_steps if settings.checkpoint_storage else None,
            start_step=int(position.get("step", 0)),
            best=None if best is None else (best.metric, best.mode),
            start_best=None if best is None else position.get("best_checkpoint"),
            balance=self.balance,
            one_share_each=settings.aggregation.get("type", "mean") != "mean",
            deposits=self.keeps_residuals(settings),
        )


@cache
def _unit(optimizer: str) -> Unit:
    """Return what the optimizer, given as JSON, has to see whole; of a user's class, trials show it."""
    made = make_optimizer(**json.loads(optimizer))
    return "module" if made.measures else "parameter" if made.needs_whole else "element"


def alone(settings: ReplicaSettings) -> ReplicaSettings:
    """Return the settings of a single worker with a model of its own."""
    return replace(settings, layout=Layout(), exchange={"type": "allreduce"}, batch_norm="local", compression={})


def under_leaf(settings: ReplicaSettings) -> ReplicaSettings:
    """Return the settings of a worker, for which a leaf server is the only server and cannot be replaced."""
    if not CentralSettings.of(settings).num_leaves:
        return settings
    return replace(settings, exchange={**settings.exchange, "shards": 1, "replicas": 1})
