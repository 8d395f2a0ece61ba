"""What a replica is told: plain, picklable values; config stops at the edge."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestray.platform.task import TaskSource

if TYPE_CHECKING:
    from orchestray.platform.config.schema import TrainConfig


@dataclass(frozen=True)
class Until:
    """Stop once a validation metric is at least (`max`) or at most (`min`) a value."""

    metric: str
    value: float
    mode: str

    def reached(self, value: float) -> bool:
        return value >= self.value if self.mode == "max" else value <= self.value


@dataclass(frozen=True)
class ReplicaSettings:
    """Everything the replicas of one run agree on. The same value goes to each of them."""

    task: TaskSource
    batch_size: int
    """Global: what one step moves the weights by."""
    epochs: int | None
    steps: int | None
    optimizer: dict[str, Any]
    lr_schedule: dict[str, Any]
    precision: str = "float32"
    accumulate: int = 1
    seed: int = 0
    grad_clip: float | None = None
    batch_norm: str = "synchronized"
    until: Until | None = None
    time_limit_s: float | None = None
    validate_every_steps: int | None = None
    """None: after every epoch."""
    exchange: dict[str, Any] = field(default_factory=dict)
    num_replicas: int = 1
    use_gpu: bool = False
    checkpoint_storage: str | None = None
    """Directory or `pyarrow.fs` URI that holds the checkpoints; None: none are written."""
    checkpoint_every_steps: int = 100
    checkpoint_keep: int = 2
    model_directory: str | None = None
    """Where the trained model goes at the end; None: nowhere."""

    @staticmethod
    def from_config(config: TrainConfig, *, storage: str, model_directory: str) -> ReplicaSettings:
        train = config.train
        until = train.until
        return ReplicaSettings(
            task=TaskSource.from_config(config.task),
            batch_size=train.batch_size,
            epochs=train.epochs,
            steps=train.steps,
            optimizer=train.optimizer.model_dump(),
            lr_schedule=train.lr_schedule.model_dump(),
            precision=train.precision,
            accumulate=train.accumulate,
            seed=train.seed,
            grad_clip=train.grad_clip,
            batch_norm=train.batch_norm,
            until=None if until is None else Until(until.metric, until.value, str(until.mode)),
            time_limit_s=train.time_limit_s,
            validate_every_steps=train.validate_every_steps,
            exchange=config.strategy.exchange.model_dump(),
            num_replicas=config.strategy.network.data,
            use_gpu=config.resources.gpus_per_worker > 0,
            checkpoint_storage=storage,
            checkpoint_every_steps=config.checkpoint.every_steps,
            checkpoint_keep=config.checkpoint.keep,
            model_directory=model_directory,
        )


@dataclass(frozen=True)
class Start:
    """How one attempt of a run begins."""

    started_at: float
    """Wall-clock time the run counts from, seconds since the epoch."""
    checkpoint: Any = None
    """The checkpoint to go on from (`platform.run.checkpoint.Found`), for replicas that hold no state of their own."""
