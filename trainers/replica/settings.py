"""What a replica is told: plain, picklable values; config stops at the edge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from orchestray.platform.config.problems import nearest
from orchestray.platform.errors import ConfigError
from orchestray.platform.task import TaskSource
from orchestray.trainers.consolidation.members import member_seed
from orchestray.trainers.layout.degrees import Layout

if TYPE_CHECKING:
    from orchestray.platform.config.faults import Fault
    from orchestray.platform.config.schema import TrainConfig


_DIVERGING = ("gossip", "averaging", "elastic_averaging", "independent")
_MEMORYLESS = ("float16", "bfloat16", "qsgd", "terngrad")
"""Compressions that need to remember nothing from one step to the next."""


@dataclass(frozen=True)
class Until:
    """Stop once a validation metric is at least (`max`) or at most (`min`) a value."""

    metric: str
    value: float
    mode: str

    def reached(self, validation: Mapping[str, Any]) -> bool:
        """Whether a validation, its means by name, has come to the goal.

        Raises:
            ConfigError: the goal is of a metric that the task has not.
        """
        if self.metric not in validation:
            known = ", ".join(sorted(validation)) or "none"
            hint = nearest(self.metric, validation)
            text = f"the task has no metric {self.metric!r}{hint} (it has: {known})"
            raise ConfigError(f"config: train.until.metric: {text}")
        value = float(validation[self.metric])
        return value >= self.value if self.mode == "max" else value <= self.value


@dataclass(frozen=True)
class PipelineSettings:
    """How the layers are cut, and in which order micro-batches go through the stages."""

    schedule: str = "1f1b"
    stages_per_worker: int | None = None
    """None: what the schedule is made for."""
    split: str | list[str] = "balanced"
    vertical_sync: bool = False


@dataclass(frozen=True)
class MemberSettings:
    """What a member of an ensemble has of its own, where they differ by more than their seeds."""

    task: TaskSource
    optimizer: dict[str, Any]
    lr_schedule: dict[str, Any]
    grad_clip: float | None
    seed: int


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
    """Micro-batches of a batch, one after the other or on their way through a pipeline."""
    seed: int = 0
    grad_clip: float | None = None
    batch_norm: str = "synchronized"
    until: Until | None = None
    time_limit_s: float | None = None
    validate_every_steps: int | None = None
    """None: after every epoch."""
    exchange: dict[str, Any] = field(default_factory=dict)
    members: tuple[MemberSettings, ...] = ()
    """Of an ensemble whose members differ by config; else none."""
    compression: dict[str, Any] = field(default_factory=dict)
    aggregation: dict[str, Any] = field(default_factory=dict)
    faults: tuple[dict[str, Any], ...] = ()
    """What shall go wrong: kind, role, rank, and the fault's own keys."""
    layout: Layout = field(default_factory=Layout)
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
    tensor_plan: str = "auto"
    """What the tensor workers split."""
    recompute: str = "none"
    distill: dict[str, Any] | None = None
    """The run whose outputs are learned too: teacher, temperature, weight; None: none."""
    use_gpu: bool = False
    checkpoint_storage: str | None = None
    """Directory or `pyarrow.fs` URI that holds the checkpoints; None: none are written."""
    checkpoint_every_steps: int = 100
    checkpoint_keep: int = 2
    model_directory: str | None = None
    """Where the trained model goes at the end; None: nowhere."""
    pause_at: int | None = None
    """The run ends when this step is completed, to be gone on with; learning rates are those of the whole budget."""

    @property
    def num_replicas(self) -> int:
        """Copies of the model, each of which computes on a share of the batch."""
        return self.layout.data // max(1, self.num_members)

    @property
    def num_members(self) -> int:
        """Models that are trained apart and answer together, each with batches of its own; 0: no ensemble."""
        return self.layout.data if self.exchange.get("type") == "independent" else 0

    def share_of(self, replica: int) -> int:
        """Which share of its batches a replica (by its index on the data axis) takes."""
        return replica % self.num_replicas

    def seed_of(self, replica: int) -> int:
        """The seed of a replica's weights, order of samples and draws: the run's, or a member's own."""
        if self.members:
            return self.members[replica].seed
        return member_seed(self.seed, replica) if self.num_members else self.seed

    def task_of(self, replica: int) -> TaskSource:
        """What a replica learns: the run's task, or that with a member's own arguments."""
        return self.members[replica].task if self.members else self.task

    @property
    def has_own_tasks(self) -> bool:
        """Whether there are members with arguments of their own for the task."""
        return any(member.task != self.task for member in self.members)

    def of_member(self, replica: int) -> ReplicaSettings:
        """These settings with the optimizer, the learning rates and the clipping that a replica trains by."""
        if not self.members:
            return self
        own = self.members[replica]
        return replace(self, optimizer=own.optimizer, lr_schedule=own.lr_schedule, grad_clip=own.grad_clip)

    @property
    def diverges(self) -> bool:
        """Whether each replica updates parameters of its own, which they agree on now and then, or never."""
        return self.exchange.get("type") in _DIVERGING

    @property
    def has_residue(self) -> bool:
        """Whether a replica keeps what its compression has not sent yet."""
        kind = self.compression.get("type", "none")
        return kind != "none" and (kind not in _MEMORYLESS or bool(self.compression.get("error_feedback")))

    @property
    def is_replicated(self) -> bool:
        """Whether every worker holds the whole state: then a survivor can hand it to whoever lacks it."""
        whole = self.layout.model_size == 1 and self.exchange.get("shard", "none") == "none"
        return whole and not self.diverges and not self.has_residue

    @property
    def is_streaming(self) -> bool:
        """Whether updates follow each other without a pause, while later micro-batches are under way."""
        return self.layout.pipeline > 1 and self.pipeline.schedule == "pipedream"

    @property
    def in_segments(self) -> bool:
        """Whether the workers tell each other losses and wishes to stop only after several steps."""
        return self.is_streaming or self.diverges

    @staticmethod
    def from_config(config: TrainConfig, *, storage: str, model_directory: str) -> ReplicaSettings:
        train, network = config.train, config.strategy.network
        until = train.until
        return ReplicaSettings(
            task=TaskSource.from_config(config.task),
            batch_size=train.batch_size,
            epochs=train.epochs,
            steps=train.steps,
            optimizer=train.optimizer.model_dump(),
            lr_schedule=train.lr_schedule.model_dump(),
            precision=train.precision,
            accumulate=num_micro_batches(config),
            seed=train.seed,
            grad_clip=train.grad_clip,
            batch_norm=train.batch_norm,
            until=None if until is None else Until(until.metric, until.value, str(until.mode)),
            time_limit_s=train.time_limit_s,
            validate_every_steps=train.validate_every_steps,
            exchange=config.strategy.exchange.model_dump(exclude={"members"}),
            members=_members(config),
            compression=config.strategy.compression.model_dump(),
            aggregation=config.strategy.aggregation.model_dump(),
            faults=tuple(_fault(fault) for fault in config.faults),
            layout=Layout(data=network.data, tensor=network.tensor, pipeline=network.pipeline),
            pipeline=PipelineSettings(
                schedule=network.schedule,
                stages_per_worker=network.stages_per_worker,
                split=network.split,
                vertical_sync=network.vertical_sync,
            ),
            tensor_plan=network.plan,
            recompute=train.recompute,
            distill=None if config.distill is None else config.distill.model_dump(),
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
    attempt: int = 0
    """How many steps at which a worker is killed on purpose are over."""


def _members(config: TrainConfig) -> tuple[MemberSettings, ...]:
    exchange = config.strategy.exchange
    if exchange.type != "independent" or not exchange.members:
        return ()
    from orchestray.platform.config.members import member_config

    made = []
    for index, changes in enumerate(exchange.members):
        own = member_config(config, index)
        seed = own.train.seed if "train.seed" in changes else member_seed(config.train.seed, index)
        made.append(
            MemberSettings(
                task=TaskSource.from_config(own.task),
                optimizer=own.train.optimizer.model_dump(),
                lr_schedule=own.train.lr_schedule.model_dump(),
                grad_clip=own.train.grad_clip,
                seed=seed,
            )
        )
    return tuple(made)


def _fault(fault: Fault) -> dict[str, Any]:
    role, rank = fault.target
    rest = fault.model_dump(include={"at_step", "factor", "attack", "scale"})
    return {"kind": fault.kind, "role": role, "rank": rank, **rest}


_MICRO_BATCHES_A_STAGE = 4
"""With so many the pipeline's bubble is small (Huang et al. 2019, section 2.3)."""


def num_micro_batches(config: TrainConfig) -> int:
    """Into how many parts a batch is split."""
    train, network = config.train, config.strategy.network
    if network.microbatches is not None:
        return network.microbatches
    if network.pipeline == 1:
        return train.accumulate
    wanted = min(_MICRO_BATCHES_A_STAGE * network.pipeline, train.batch_size)
    # Schedules in rounds want a multiple of the workers, if the batch has one.
    fitting = [n for n in range(1, wanted + 1) if train.batch_size % n == 0]
    rounds = [n for n in fitting if n % network.pipeline == 0]
    return max(rounds or fitting)
