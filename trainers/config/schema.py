"""The schema of a training config: immutable sections that check the type and range of each value.

Rules between keys are in checks.py, so that their problems can be reported together with all others.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, ValidationInfo, field_validator

from orchestray.platform.config.base import (
    AboveZero,
    AtLeastZero,
    Count,
    Flag,
    Number,
    Positive,
    Section,
    Seed,
    Text,
    text_like,
)
from orchestray.platform.config.metric_names import Mode, mode_of_metric
from orchestray.trainers.aggregation.params import Mean
from orchestray.trainers.compression.params import NoCompression
from orchestray.trainers.config.faults import Distill, Fault
from orchestray.trainers.config.sections import Aggregation, Compression, Exchange, Quantize
from orchestray.trainers.ensemble.params import EnsembleLoss
from orchestray.trainers.optim.batch_params import LrScaling, NoiseScale
from orchestray.trainers.optim.params import Constant
from orchestray.trainers.optim.sections import Average, BatchSchedule, LrSchedule, Optimizer
from orchestray.trainers.solvers.sections import Solver
from orchestray.trainers.sync.allreduce.params import AllReduce
from orchestray.trainers.tasks.params import TaskConfig
from orchestray.trainers.tasks.section import AnyTask

__all__ = [
    "BestCheckpoint",
    "CheckpointSection",
    "EarlyStopping",
    "Network",
    "Resources",
    "Strategy",
    "TaskConfig",
    "TrainConfig",
    "TrainSection",
    "Until",
]


Names = Annotated[tuple[Text, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
"""Texts, of which one alone may stand without brackets."""


def resolve_mode(mode: Mode | None, info: ValidationInfo) -> Mode | None:
    """Return the direction of a metric, by its name if none is given; None if that does not say it."""
    return mode or mode_of_metric(str(info.data.get("metric", "")))


class Until(Section):
    """A goal that ends the run early, checked after each validation."""

    metric: Text
    """Name of a validation metric, or `loss`."""
    value: Number
    """Value that the metric must reach."""
    mode: Mode | None = None
    """Direction of the goal: at least (`max`) or at most (`min`) the value; null: by the metric's name, or by the
    task's `lower_is_better`; required where neither says it."""

    _resolve_mode = field_validator("mode", mode="after")(resolve_mode)


class EarlyStopping(Section):
    """An end of the run once a validation metric has not become better for some validations."""

    metric: Text
    """Name of a validation metric, or `loss`."""
    patience: Positive = 5
    """Number of validations in a row without a better value after which the run ends."""
    min_delta: AtLeastZero = 0.0
    """Least difference from the best value that counts as better."""
    mode: Mode | None = None
    """Direction that is better; null: the same as in `train.until.mode`."""

    _resolve_mode = field_validator("mode", mode="after")(resolve_mode)


class TrainSection(Section):
    """The training itself. Nothing here depends on the number of workers."""

    batch_size: Positive
    """Number of samples per step, over all workers."""
    batch_schedule: BatchSchedule | None = None
    """Schedule by which the batch grows from `batch_size`; null: it stays."""
    noise_scale: NoiseScale | None = None
    """Measurement of the gradient noise scale in every step; null: none, unless `batch_schedule` needs it."""
    drop_last: Flag = False
    """True to leave out the last batch of an epoch if it is short."""
    epochs: Positive | None = None
    """Number of passes over the training samples; or give `steps`."""
    init: Literal["xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal", "orthogonal"] | None = None
    """Distribution of the fresh weights of layers, by `torch.nn.init`, with biases of zero; null: the model's own."""
    init_gain: AboveZero = 1.0
    """Factor on the weights that `init` draws."""
    init_from: Text | None = None
    """Weights to start with: those of a run, of a folder with `model.safetensors`, or of a file; null: fresh ones."""
    init_except: Names = ()
    """Patterns of names of parameters and buffers that `init_from` does not give, as those of a new head."""
    freeze: Names = ()
    """Patterns of names of parameters that are not trained."""
    weight_norm: Flag = False
    """True to train the weights of each output of a layer as a length and a direction, which need no batch."""
    init_keeps: Literal["zeros", "values"] | None = None
    """Property of the weights of `init_from` that training keeps: `zeros` stay zero (a pruned network), or weights
    of equal `values` move together and zeros stay zero (shared values); null: nothing."""
    steps: Positive | None = None
    """Number of updates; or give `epochs`."""
    until: Until | None = None
    """A goal that ends the run early."""
    early_stopping: EarlyStopping | None = None
    """An end once a metric has not become better for some validations; null: none."""
    time_limit_s: AboveZero | None = None
    """Seconds after which the run ends early."""
    optimizer: Optimizer | None = None
    """Optimizer that updates the weights; or give `solver`."""
    solver: Solver | None = None
    """Solver that chooses each step from the loss at several places; or give `optimizer`."""
    average: Average | None = None
    """Average of the weights that is validated and kept, while training goes on with the weights; null: none."""
    lr_schedule: LrSchedule = Constant()
    """Schedule of the learning rate over the run."""
    lr_scaling: LrScaling | None = None
    """Scaling of the learning rate with `batch_size`; null: none."""
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    """Data type of the model's computation; with bfloat16 the weights themselves stay float32."""
    float32_matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Rounding of what float32 products take, as in `torch.set_float32_matmul_precision`: `highest` rounds nothing,
    `high` allows TF32 on a GPU, in convolutions, too."""
    deterministic: bool = False
    """True to use only operations that give the same bits each time on a GPU; slower, and refused by some models."""
    cudnn_benchmark: bool = False
    """True to let cuDNN time its algorithms for each shape, and take the fastest."""
    quantize: Quantize | None = None
    """Few bits in which linear and convolutional layers compute, with real weights behind them; null: `precision`."""
    ensemble: EnsembleLoss | None = None
    """Members of one model, with a loss on their averaged answer; null: the task's model and loss."""
    accumulate: Positive = 1
    """Number of micro-batches that a batch is split into, computed one after the other; saves memory, and does not
    change the result."""
    seed: Seed = 0
    """Seed of the weights, the order of the samples and all other random choices."""
    batch_norm: Literal["synchronized", "local"] = "synchronized"
    """Samples that batch normalisation sees: the whole batch (as in one process), or each worker's own share."""
    buffers: Literal["average", "broadcast", "error"] | None = None
    """Rule for other buffers that depend on the samples of a worker's share: their average over the replicas, weighted
    by samples, those of the first replica, or an error; null: `average`, with a warning."""
    recompute: Literal["none", "blocks", "sqrt"] = "none"
    """Activations that are computed again in the backward pass instead of being kept: none, those inside each block, or
    those of all layers but about the square root of their number."""
    grad_clip: AboveZero | None = None
    """Largest norm of the whole gradient; a larger one is scaled down to it."""
    validate_every_steps: Positive | None = None
    """Number of steps between two validations; null: after every epoch."""
    loss_is: Literal["mean", "between_samples"] = "mean"
    """Kind of the loss: a `mean` over samples (or over what the task's `weight` counts), which is checked in the first
    step; or one `between_samples`, of which each worker and micro-batch sees its own samples alone."""


Schedule = Literal["naive", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dual_pipe_v", "pipedream"]


class Network(Section):
    """The layout of the network over data x tensor x pipeline workers."""

    data: Positive = 1
    """Number of replicas, each of which computes on a share of the batch."""
    tensor: Positive = 1
    """Number of workers that each layer is split over."""
    pipeline: Positive = 1
    """Number of workers that the layers are spread over, one after the other."""
    schedule: Schedule = "1f1b"
    """Order of the micro-batches in the pipeline; `pipedream` updates the weights after each of them."""
    microbatches: Positive | None = None
    """Number of micro-batches that a batch is split into; null: four per worker of the pipeline, or the nearest number
    below that divides the batch."""
    stages_per_worker: Positive | None = None
    """Number of stages per worker of the pipeline; null: the number that the schedule is made for (1 or 2)."""
    split: Literal["balanced", "equal"] | list[Text] = "balanced"
    """Cuts between the stages: `balanced` measures the layers, `equal` counts them; or the names of the layers that
    begin a stage."""
    vertical_sync: Flag = False
    """True to use the same version of the weights on every stage for a micro-batch (with `pipedream`)."""
    plan: Literal["auto", "channels", "spatial", "branches", "one_weird_trick"] = "auto"
    """Split over the `tensor` workers: features and heads (`auto`), `channels` of convolutions, their images
    (`spatial`), `branches` of blocks, or the batch in convolutions and the features after them (`one_weird_trick`)."""


class Strategy(Section):
    """The distribution of the work over processes, along the axes of the survey."""

    network: Network = Network()
    """Layout of the network over the workers."""
    exchange: Exchange = AllReduce()
    """Exchange by which the replicas agree on the parameters."""
    compression: Compression = NoCompression()
    """Compression of what the replicas send."""
    aggregation: Aggregation = Mean()
    """Rule that combines the gradients."""


class BestCheckpoint(Section):
    """The checkpoint with the best value of a validation metric."""

    metric: Text
    """Name of a validation metric, or `loss`."""
    mode: Mode | None = None
    """Direction that is better; null: the same as in `train.until.mode`."""
    export: Flag = True
    """True to have the run end with the model of this checkpoint; False: with that of the last step."""

    _resolve_mode = field_validator("mode", mode="after")(resolve_mode)


class CheckpointSection(Section):
    """The times and the place of the checkpoints."""

    every_steps: Positive = 100
    """Number of steps between two checkpoints."""
    keep: Positive = 2
    """Number of checkpoints to keep."""
    best: BestCheckpoint | None = None
    """A checkpoint that is kept besides these: the one with the best value of a metric; null: none."""
    storage: Text | None = None
    """Place of the checkpoints: a pyarrow.fs URI (s3://, gs://) or a path; null: the run directory."""


class Resources(Section):
    """The resources of the workers."""

    cpus_per_worker: AboveZero = 1.0
    """Number of CPUs per worker."""
    gpus_per_worker: AtLeastZero = 0.0
    """Number of GPUs per worker, or a fraction of one; a worker computes on one, and only reserves more."""
    peak_tflops: AboveZero | None = None
    """Peak of a worker's device in the run's precision, TFLOP/s, for `mfu` in the metrics; null: that of known GPUs."""
    spares: Count = 0
    """Number of spare workers, started in advance, that replace lost ones."""

    @property
    def num_threads(self) -> int:
        """Number of threads that a worker computes with."""
        return max(1, int(self.cpus_per_worker))


RunName = Annotated[
    str,
    text_like(
        r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        "letters, digits, '.', '_' and '-', starting with a letter or a digit",
        max_length=120,
    ),
]


class TrainConfig(Section):
    """The config of a training run."""

    name: RunName = "run"
    """Name of the run and of its directory; default: the name of the config's file."""
    task: AnyTask
    """Task to train."""
    train: TrainSection
    """Training settings, independent of the number of workers."""
    strategy: Strategy = Strategy()
    """Distribution of the work over processes."""
    checkpoint: CheckpointSection = CheckpointSection()
    """Times and place of the checkpoints."""
    resources: Resources = Resources()
    """Resources of the workers."""
    engine: Literal["actors", "ray_train"] = "actors"
    """Engine that runs the replicas: orchestray's own actors, or ray.train.torch.TorchTrainer."""
    max_restarts: Count = 3
    """Number of restarts after lost workers before the run gives up."""
    hang_timeout_s: AboveZero | None = 60.0
    """Seconds for which a process may not answer, as one that is stopped or starved; then it is killed, and replaced
    like any other lost one. null: for ever."""
    report_hang_s: AboveZero | None = 60.0
    """Seconds without a step after which a warning names the silent workers and those that wait for them, unless ten
    steps take longer. null: never."""
    stall_timeout_s: AboveZero | None = 600.0
    """Seconds for which a worker that answers may make no progress and wait for no other, unless ten of its shares take
    longer; then it is replaced like a lost one. null: for ever."""
    trackers: tuple[Text, ...] = ()
    """Trackers that get the metrics while the run goes on: `mlflow`, `wandb`, `trackio`, or classes."""
    distill: Distill | None = None
    """Distillation from another run's outputs; null: none."""
    allow_faults: Flag = False
    """True to allow `faults`."""
    faults: tuple[Fault, ...] = ()
    """Faults to inject, for chaos tests."""
