"""What a training config may hold. Every section is frozen; a config that exists is a config that was checked.

Rules between keys are in checks.py, so that they can be reported beside everything else that is wrong.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from orchestray.platform.config.base import (
    AboveZero,
    AtLeastZero,
    Count,
    Flag,
    Number,
    Positive,
    Section,
    Text,
)
from orchestray.platform.config.compressions import Aggregation, Compression, Mean, NoCompression
from orchestray.platform.config.exchanges import AllReduce, Exchange
from orchestray.platform.config.faults import Distill, Fault
from orchestray.platform.config.optimizers import Constant, LrSchedule, Optimizer
from orchestray.platform.config.tasks import AnyTask, TaskConfig

__all__ = [
    "CheckpointSection",
    "Network",
    "Resources",
    "Strategy",
    "TaskConfig",
    "TrainConfig",
    "TrainSection",
    "Until",
]


class Until(Section):
    """A goal that ends the run early, looked at after each validation."""

    metric: Text
    """Name of a validation metric, or `loss`."""
    value: Number
    """What it has to reach."""
    mode: Literal["max", "min"] | None = None
    """Whether more is better; null: `min` for a metric that ends with "loss" or "error", else `max`."""

    @field_validator("mode", mode="after")
    @classmethod
    def _resolve_mode(cls, mode: str | None, info: ValidationInfo) -> str:
        return mode or ("min" if str(info.data.get("metric", "")).endswith(("loss", "error")) else "max")


class TrainSection(Section):
    """How it is learned. Nothing here depends on how many workers there are."""

    batch_size: Positive
    """Samples that one step moves the weights by, over all workers."""
    epochs: Positive | None = None
    """Times each sample is used; or give `steps`."""
    steps: Positive | None = None
    """Number of updates; or give `epochs`."""
    until: Until | None = None
    """A goal that ends the run early."""
    time_limit_s: AboveZero | None = None
    """Seconds after which the run ends early."""
    optimizer: Optimizer
    """The rule of an update."""
    lr_schedule: LrSchedule = Constant()
    """How the learning rate changes over the run."""
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type the model computes in; with bfloat16 the weights themselves stay float32."""
    accumulate: Positive = 1
    """Micro-batches a batch is split into, one after the other; saves memory, changes no result."""
    seed: Count = 0
    """Seed of the weights, the order of the samples and everything else that is drawn."""
    batch_norm: Literal["synchronized", "local"] = "synchronized"
    """Whether batch normalisation sees the whole batch (as one process would) or each worker's share."""
    recompute: Literal["none", "blocks", "sqrt"] = "none"
    """Activations that are computed again in the backward pass in place of being kept: none, those inside each block,
    or all but about the square root of the layers'."""
    grad_clip: AboveZero | None = None
    """Largest norm of the whole gradient; a longer one is scaled down to it."""
    validate_every_steps: Positive | None = None
    """Steps between two validations; null: after every epoch."""


Schedule = Literal["naive", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dual_pipe_v", "pipedream"]


class Network(Section):
    """How the network is laid out over the workers: data x tensor x pipeline."""

    data: Positive = 1
    """Number of replicas, each of which computes on a share of the batch."""
    tensor: Positive = 1
    """Workers a layer is split over."""
    pipeline: Positive = 1
    """Workers the layers are spread over, one after the other."""
    schedule: Schedule = "1f1b"
    """In which order the micro-batches go through the stages; `pipedream` updates after each of them."""
    microbatches: Positive | None = None
    """Parts a batch is split into on its way through the stages; null: four a stage, or the nearest number below that
    divides the batch."""
    stages_per_worker: Positive | None = None
    """Stages of each of those workers; null: what the schedule is made for (1 or 2)."""
    split: Literal["balanced", "equal"] | list[Text] = "balanced"
    """Where the layers are cut: `balanced` measures them, `equal` counts them; or the names of the layers that begin a
    stage."""
    vertical_sync: Flag = False
    """With `pipedream`: a micro-batch uses the same version of the weights on every stage."""
    plan: Literal["auto", "channels", "spatial", "branches", "one_weird_trick"] = "auto"
    """What the `tensor` workers split: `auto` features and heads; `channels` of convolutions, their images (`spatial`),
    the branches of blocks, or the batch before and the features after the convolutions (`one_weird_trick`)."""


class Strategy(Section):
    """How the work is spread over processes: the axes of the survey."""

    network: Network = Network()
    """How the network is laid out."""
    exchange: Exchange = AllReduce()
    """How the replicas agree on the parameters."""
    compression: Compression = NoCompression()
    """What is put on the wire."""
    aggregation: Aggregation = Mean()
    """How gradients are combined."""


class CheckpointSection(Section):
    """When and where the state of the run is saved."""

    every_steps: Positive = 100
    """Steps between two checkpoints."""
    keep: Positive = 2
    """Checkpoints that are kept."""
    storage: Text | None = None
    """A pyarrow.fs URI (s3://, gs://, a path); null: the run directory."""


class Resources(Section):
    """What each worker is given."""

    cpus_per_worker: AboveZero = 1.0
    """CPUs of a worker."""
    gpus_per_worker: AtLeastZero = 0.0
    """GPUs of a worker."""
    spares: Count = 0
    """Warm workers that step in for a lost one."""

    @property
    def num_threads(self) -> int:
        """That a worker computes by."""
        return max(1, int(self.cpus_per_worker))


RunName = Annotated[str, Field(strict=True, max_length=120, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class TrainConfig(Section):
    """A training run."""

    name: RunName
    """Name of the run, and of its directory."""
    task: AnyTask
    """What is learned."""
    train: TrainSection
    """How it is learned."""
    strategy: Strategy = Strategy()
    """How the work is spread over processes."""
    checkpoint: CheckpointSection = CheckpointSection()
    """When and where the state is saved."""
    resources: Resources = Resources()
    """What each worker is given."""
    engine: Literal["actors", "ray_train"] = "actors"
    """Who runs the replicas: orchestray's own actors, or ray.train.torch.TorchTrainer."""
    max_restarts: Count = 3
    """Lost workers that are replaced before the run gives up."""
    distill: Distill | None = None
    """Train on another run's outputs."""
    allow_faults: Flag = False
    """Let `faults` happen."""
    faults: tuple[Fault, ...] = ()
    """What shall go wrong, for chaos tests."""
