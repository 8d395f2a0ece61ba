"""What the processes of a centralised run agree on beside what every replica is told."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from orchestray.trainers.central.plan import Balance, Consistency, LedgerSettings
from orchestray.trainers.layout.degrees import Layout
from orchestray.trainers.replica.settings import ReplicaSettings

_SERVER = ("shards", "replicas", "groups", "persist", "transport")
MAX_AHEAD = 64
"""Shares a worker may hold that changes the parameters itself: so many are short ones."""


@dataclass(frozen=True)
class CentralSettings:
    """Of the section `strategy.exchange` of type `parameter_server`."""

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
    """Whether workers make steps of their own, and servers take the mean of their changes."""
    global_lr: float = 1.0
    """With `decouples_rates`: of the servers."""
    overlap: bool = False
    persist: bool = False
    groups: int = 1
    """Leaf servers; 1: none."""
    in_shared_memory: bool = False
    """Whether workers change the parameters themselves (HOGWILD)."""

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
            groups=exchange["groups"],
            in_shared_memory=exchange["transport"] == "shared_memory",
        )

    @property
    def num_servers(self) -> int:
        """Rank r holds copy r // shards of shard r % shards; the lead is rank 0."""
        return self.shards * self.replicas

    @property
    def lookahead(self) -> int:
        return MAX_AHEAD if self.in_shared_memory else self.push_every + (1 if self.overlap else 0)

    def keeps_residuals(self, settings: ReplicaSettings) -> bool:
        """Whether servers keep copies of what workers' compressors keep (`residuals`); leaf servers pass none on."""
        return settings.has_residue and self.groups == 1

    def ledger(
        self, settings: ReplicaSettings, num_samples: int, num_validation_samples: int, start_step: int
    ) -> LedgerSettings:
        """What the ledger is told."""
        return LedgerSettings(
            num_samples=num_samples,
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
            start_step=start_step,
            balance=self.balance,
            one_share_each=settings.aggregation.get("type", "mean") != "mean",
            deposits=self.keeps_residuals(settings),
        )


def alone(settings: ReplicaSettings) -> ReplicaSettings:
    """The settings of one worker, whose model nobody shares."""
    return replace(settings, layout=Layout(), exchange={"type": "allreduce"}, batch_norm="local", compression={})


def under_leaf(settings: ReplicaSettings) -> ReplicaSettings:
    """What a worker goes by: to one under a leaf server that is the one server there is, and nobody takes its place."""
    if settings.exchange["groups"] == 1:
        return settings
    return replace(settings, exchange={**settings.exchange, "shards": 1, "replicas": 1})
