"""The settings of the replicas as plain, picklable values, so that the training code does not depend on the config."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from orchestray.platform.task import TaskSource
from orchestray.trainers.compression.registry import COMPRESSIONS
from orchestray.trainers.config.goals import Best, EarlyStop, Until
from orchestray.trainers.core.arithmetic import Arithmetic
from orchestray.trainers.core.initial_model import InitialModel
from orchestray.trainers.core.members import member_seed
from orchestray.trainers.layout.degrees import Layout
from orchestray.trainers.optim.batch_params import Measured, NoiseScale
from orchestray.trainers.optim.batch_sizes import scaled_lr
from orchestray.trainers.sync.registry import EXCHANGES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestray.platform.config.base import Section
    from orchestray.trainers.config.faults import Fault
    from orchestray.trainers.config.schema import TrainConfig, TrainSection


@dataclass(frozen=True)
class PipelineSettings:
    """The settings of a pipeline: the cuts between its stages, and the order of its micro-batches."""

    schedule: str = "1f1b"
    stages_per_worker: int | None = None
    """None: the number that the schedule is made for."""
    split: str | list[str] = "balanced"
    vertical_sync: bool = False


@dataclass(frozen=True)
class MemberSettings:
    """The settings of one member of an ensemble whose members differ by more than their seeds."""

    task: TaskSource
    optimizer: dict[str, Any]
    lr_schedule: dict[str, Any]
    grad_clip: float | None
    seed: int


@dataclass(frozen=True)
class ReplicaSettings:
    """The settings that all replicas of a run share."""

    task: TaskSource
    batch_size: int
    """Number of samples per step, over all workers."""
    epochs: int | None
    steps: int | None
    optimizer: dict[str, Any]
    """Keys of the optimizer; empty if there is a solver."""
    lr_schedule: dict[str, Any]
    solver: dict[str, Any] | None = None
    """Keys of the solver; None: an optimizer updates the weights."""
    batch_schedule: dict[str, Any] | None = None
    """Keys of the schedule by which batches grow; None: they stay as they are."""
    noise_scale: dict[str, Any] | None = None
    """Keys of the measurement of the gradient noise scale; None: it is not measured."""
    drop_last: bool = False
    """True if the last batch of an epoch is left out where it is short."""
    precision: str = "float32"
    accumulate: int = 1
    """Number of micro-batches per batch, computed one after the other or in a pipeline."""
    seed: int = 0
    average: dict[str, Any] | None = None
    """Keys of the average of the weights; None: there is none."""
    grad_clip: float | None = None
    batch_norm: str = "synchronized"
    buffers: str | None = None
    """Rule for buffers in which the replicas differ; None: their average, with a warning."""
    until: Until | None = None
    early_stop: EarlyStop | None = None
    time_limit_s: float | None = None
    validate_every_steps: int | None = None
    """None: after every epoch."""
    loss_is: str = "mean"
    initial: InitialModel = field(default_factory=InitialModel)
    """Changes of the model that the task builds, before the first step."""
    exchange: dict[str, Any] = field(default_factory=dict)
    members: tuple[MemberSettings, ...] = ()
    """Settings of each member of an ensemble whose members differ by config; otherwise empty."""
    compression: dict[str, Any] = field(default_factory=dict)
    aggregation: dict[str, Any] = field(default_factory=dict)
    faults: tuple[dict[str, Any], ...] = ()
    """Faults to inject: kind, role, rank, and the fault's own keys."""
    layout: Layout = field(default_factory=Layout)
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
    tensor_plan: str = "auto"
    """Split over the tensor workers, the key `plan` of the config."""
    recompute: str = "none"
    distill: dict[str, Any] | None = None
    """Settings of the distillation (teacher, temperature, weight); None: no distillation."""
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    gpus: float = 0.0
    """GPUs of a worker, or the fraction of one; 0: it computes on the CPU."""
    peak_tflops: float | None = None
    """Peak of a worker's device, TFLOP/s; None: that of known GPUs."""
    checkpoint_storage: str | None = None
    """Directory or `pyarrow.fs` URI of the checkpoints; None: no checkpoints are written."""
    checkpoint_every_steps: int = 100
    checkpoint_keep: int = 2
    best: Best | None = None
    """Choice of the checkpoint that is kept besides the newest ones; None: there is none."""
    model_directory: str | None = None
    """Directory for the trained model at the end; None: the model is not saved."""
    pause_at: int | None = None
    """Step after which the run pauses, to be resumed; learning rates still follow the whole budget. None: no pause."""

    @property
    def lr(self) -> float:
        """Learning rate of the optimizer, or of the solver."""
        return float((self.optimizer if self.solver is None else self.solver)["lr"])

    @property
    def num_replicas(self) -> int:
        """Number of copies of a model, each of which computes on a share of the batch."""
        return self.layout.data // max(1, self.num_members)

    @property
    def num_members(self) -> int:
        """Number of members of an ensemble, each of which trains on its own batches; 0: not an ensemble."""
        return self.layout.data if self.exchange.get("type") == "independent" else 0

    @property
    def num_endless(self) -> int | None:
        """Number of samples of the whole run; None: it depends on the data."""
        return None if self.steps is None else self.steps * self.batch_size

    def share_of(self, replica: int) -> int:
        """Return the index of the share that a replica takes of each batch.

        Args:
            replica: index on the data axis, which in an ensemble is that of the member.
        """
        return replica % self.num_replicas

    def seed_of(self, replica: int) -> int:
        """Return the seed of a replica's weights, sample order and random choices: the run's, or its member's own."""
        if self.members:
            return self.members[replica].seed
        return member_seed(self.seed, replica) if self.num_members else self.seed

    def task_of(self, replica: int) -> TaskSource:
        """Return the task of a replica: the run's, or for an ensemble the one with the member's own arguments."""
        return self.members[replica].task if self.members else self.task

    @property
    def has_own_tasks(self) -> bool:
        """True if a member has task arguments of its own."""
        return any(member.task != self.task for member in self.members)

    def of_member(self, replica: int) -> ReplicaSettings:
        """Return these settings with the optimizer, schedule and clipping of the replica's own member."""
        if not self.members:
            return self
        own = self.members[replica]
        return replace(self, optimizer=own.optimizer, lr_schedule=own.lr_schedule, grad_clip=own.grad_clip)

    @cached_property
    def diverges(self) -> bool:
        """True if each replica updates its own parameters, and synchronizes them only now and then, or never."""
        return EXCHANGES.params(self.exchange.get("type", "allreduce")).diverges

    @cached_property
    def has_residual(self) -> bool:
        """True if each replica keeps a residual of what its compression has not sent yet."""
        kind = self.compression.get("type", "none")
        is_memoryless = COMPRESSIONS.params(kind).is_memoryless
        return kind != "none" and (not is_memoryless or bool(self.compression.get("error_feedback")))

    @cached_property
    def is_replicated(self) -> bool:
        """True if every worker holds the whole state, so that a survivor can send it to a worker without it."""
        whole = self.layout.model_size == 1 and self.exchange.get("shard", "none") == "none"
        return whole and not self.diverges and not self.has_residual

    @cached_property
    def is_streaming(self) -> bool:
        """True if the pipeline updates weights without a flush, while later micro-batches are in flight (PipeDream)."""
        return self.layout.pipeline > 1 and self.pipeline.schedule == "pipedream"

    @property
    def texts(self) -> dict[str, str]:
        """Texts of the user's files that the workers import, by path."""
        found = dict(self.task.texts)
        for own in self.members:
            found |= own.task.texts | _texts_of(own.optimizer) | _texts_of(own.lr_schedule)
        outer = self.exchange.get("outer_optimizer") or {}
        return found | _texts_of(self.optimizer) | _texts_of(self.lr_schedule) | _texts_of(outer)

    @property
    def validation_goals(self) -> dict[str, Until | EarlyStop | Best]:
        """Goals on a validation, by their keys in the config; empty if there are none."""
        goals = {"train.until": self.until, "train.early_stopping": self.early_stop, "checkpoint.best": self.best}
        return {key: goal for key, goal in goals.items() if goal is not None}

    @staticmethod
    def from_config(config: TrainConfig, *, storage: str, model_directory: str) -> ReplicaSettings:
        train, network = config.train, config.strategy.network
        until, early, best = train.until, train.early_stopping, config.checkpoint.best
        return ReplicaSettings(
            task=TaskSource.from_config(config.task, train),
            batch_size=train.batch_size,
            batch_schedule=None if train.batch_schedule is None else train.batch_schedule.model_dump(),
            noise_scale=_noise_scale(train),
            drop_last=train.drop_last,
            epochs=train.epochs,
            steps=train.steps,
            optimizer=_optimizer(train),
            lr_schedule=_with_source(train.lr_schedule, "schedule"),
            solver=None if train.solver is None else train.solver.model_dump(),
            precision=train.precision,
            accumulate=num_micro_batches(config),
            seed=train.seed,
            average=None if train.average is None else train.average.model_dump(),
            grad_clip=train.grad_clip,
            batch_norm=train.batch_norm,
            buffers=train.buffers,
            until=None if until is None else Until(until.metric, until.value, str(until.mode)),
            early_stop=(
                None if early is None else EarlyStop(early.metric, early.patience, early.min_delta, str(early.mode))
            ),
            time_limit_s=train.time_limit_s,
            validate_every_steps=train.validate_every_steps,
            loss_is=train.loss_is,
            initial=InitialModel(
                train.precision,
                train.init,
                train.init_gain,
                train.init_from,
                train.init_except,
                train.freeze,
                train.weight_norm,
                train.init_keeps,
            ),
            exchange=_exchange(config),
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
            arithmetic=Arithmetic(train.deterministic, train.float32_matmul_precision, train.cudnn_benchmark),
            gpus=config.resources.gpus_per_worker,
            peak_tflops=config.resources.peak_tflops,
            checkpoint_storage=storage,
            checkpoint_every_steps=config.checkpoint.every_steps,
            checkpoint_keep=config.checkpoint.keep,
            best=None if best is None else Best(best.metric, str(best.mode), best.export),
            model_directory=model_directory,
        )


@dataclass(frozen=True)
class Start:
    """The start of one attempt of a run."""

    started_at: float
    """Wall-clock time at which the run began, in seconds since the Unix epoch."""
    checkpoint: Any = None
    """Checkpoint to resume from (`platform.run.checkpoint.Found`), for replicas without a state of their own."""
    attempt: int = 0
    """Number of steps with injected kills of workers that are already over."""


def texts_of(config: TrainConfig) -> dict[str, str]:
    """Return the texts of the user's files that the processes of a run import, by path."""
    return ReplicaSettings.from_config(config, storage="", model_directory="").texts


def _with_source(section: Section, noun: str) -> dict[str, Any]:
    """Return the keys of a section with a `type`; of a user's class, the texts of its file and modules as well."""
    chosen = section.model_dump()
    if ":" in chosen["type"]:
        source = TaskSource.of_class(chosen["type"], {}, noun=noun)
        chosen |= {"file": source.file, "source": source.source, "modules": source.modules}
    return chosen


def _optimizer(train: TrainSection) -> dict[str, Any]:
    """Return the keys of the optimizer, with rates for the batch if `lr_scaling` says so; empty: there is a solver."""
    if train.optimizer is None:
        return {}
    chosen = _with_source(train.optimizer, "optimizer")
    if train.lr_scaling is not None:
        scale = partial(scaled_lr, train.lr_scaling.model_dump(), batch_size=train.batch_size)
        chosen["lr"] = scale(chosen["lr"])
        groups = [{**group, "lr": scale(group["lr"])} if "lr" in group else group for group in chosen["groups"]]
        chosen["groups"] = tuple(groups)
    return chosen


def _noise_scale(train: TrainSection) -> dict[str, Any] | None:
    if train.noise_scale is not None:
        return train.noise_scale.model_dump()
    return NoiseScale().model_dump() if isinstance(train.batch_schedule, Measured) else None


def _texts_of(section: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the files of a user's class that a section of `_with_source` names."""
    return {section["file"]: section["source"], **section["modules"]} if section.get("file") else {}


def _exchange(config: TrainConfig) -> dict[str, Any]:
    exchange = config.strategy.exchange
    chosen = exchange.model_dump(exclude={"members"})
    if exchange.type == "averaging" and exchange.outer_optimizer is not None:
        chosen["outer_optimizer"] = _with_source(exchange.outer_optimizer, "optimizer")
    return chosen


def _members(config: TrainConfig) -> tuple[MemberSettings, ...]:
    exchange = config.strategy.exchange
    if exchange.type != "independent" or not exchange.members:
        return ()
    from orchestray.trainers.config.members import member_config

    made = []
    for index, changes in enumerate(exchange.members):
        own = member_config(config, index)
        seed = own.train.seed if "train.seed" in changes else member_seed(config.train.seed, index)
        made.append(
            MemberSettings(
                task=TaskSource.from_config(own.task, own.train),
                optimizer=_optimizer(own.train),
                lr_schedule=_with_source(own.train.lr_schedule, "schedule"),
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
"""Number of micro-batches per stage that makes the pipeline's bubble small (Huang et al. 2019, section 2.3)."""


def num_micro_batches(config: TrainConfig) -> int:
    """Return the number of micro-batches that a batch is split into."""
    train, network = config.train, config.strategy.network
    if network.microbatches is not None:
        return network.microbatches
    if network.pipeline == 1:
        return train.accumulate
    wanted = min(_MICRO_BATCHES_A_STAGE * network.pipeline, train.batch_size)
    # Schedules in rounds need a multiple of the number of workers, if the batch has such a divisor.
    fitting = [n for n in range(1, wanted + 1) if train.batch_size % n == 0]
    rounds = [n for n in fitting if n % network.pipeline == 0]
    return max(rounds or fitting)
