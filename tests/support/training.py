"""Runs of the real training loop, replicas as threads, looked at after every step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.data.order import window_order
from orchestray.platform.data.source import open_split
from orchestray.platform.data.stream import SampleStream
from orchestray.platform.data.tensors import to_tensor
from orchestray.platform.run.checkpoint import CheckpointWriter
from orchestray.platform.run.recorder import Recorder
from orchestray.platform.task import Task, training_batch_of
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.core.outcome import Outcome
from orchestray.trainers.loop.replica import Replica
from orchestray.trainers.tasks import resolve
from support.threads import run_replicas

State = dict[str, Tensor]


class Rows:
    """A task over rows in memory: regression with the squared loss, or classification where targets are integers."""

    def __init__(self, inputs: np.ndarray, targets: np.ndarray, model: Callable[[], nn.Module]) -> None:
        flat = pa.array(np.ascontiguousarray(inputs).reshape(-1))
        columns = pa.FixedSizeListArray.from_arrays(flat, inputs[0].size)
        self.table = pa.table({"inputs": columns, "targets": pa.array(targets)})
        self._shape = inputs.shape[1:]
        self._model = model
        self._classes = np.issubdtype(targets.dtype, np.integer)

    def build_model(self) -> nn.Module:
        return self._model()

    def dataset(self, split: str) -> pa.Table:
        return self.table

    def to_batch(self, columns: pa.Table) -> State:
        inputs = to_tensor(columns["inputs"])
        return {"inputs": inputs.reshape(-1, *self._shape), "targets": to_tensor(columns["targets"])}

    def loss(self, outputs: Tensor, batch: State) -> Tensor:
        if self._classes:
            return functional.cross_entropy(outputs, batch["targets"])
        return functional.mse_loss(outputs.reshape(-1), batch["targets"])

    def metrics(self, outputs: Tensor, batch: State) -> State:
        if self._classes:
            return {"accuracy": (outputs.argmax(1) == batch["targets"]).double().mean()}
        return {"error": self.loss(outputs, batch)}


class Watch(Recorder):
    """A recorder that keeps the state of the replica after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.replica: Replica | None = None
        self.steps: list[dict[str, Any]] = []
        self.weights: list[State] = []
        self.optimizer: list[State] = []

    def record(self, line: dict[str, Any]) -> None:
        super().record(line)
        if "loss" in line and "split" not in line and self.replica is not None:
            self.steps.append(line)
            self.weights.append(state_of(self.replica.model))
            self.optimizer.append({k: v.clone() for k, v in self.replica.optimizer.state_tensors().items()})


@dataclass
class Trained:
    """One replica's run."""

    replica: Replica
    outcome: Outcome
    before: State
    """The model before the first step."""
    steps: list[dict[str, Any]]
    """A metric line a step."""
    weights: list[State]
    """Parameters and buffers after each step."""
    optimizer: list[State]
    """State of the optimizer after each step."""
    calls: list[tuple[str, int]] = field(default_factory=list)
    """Collective operations in order, each with its number of elements."""

    @property
    def sent_by_exchange(self) -> int:
        """Bytes that this replica sent in the group of its exchange, which has one of its own or sends nothing else."""
        exchange: Any = self.replica.exchange
        sent: int = exchange.joined().own_bytes_sent
        return sent

    @property
    def after(self) -> State:
        return self.weights[-1]

    @property
    def gradient(self) -> State:
        """The gradient of a run of one step of plain SGD with a rate of 1, exact in float64 up to a rounding."""
        assert len(self.weights) == 1
        return {name: self.before[name] - value for name, value in self.after.items()}


def state_of(model: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def order_of(num_samples: int, *, seed: int, epoch: int) -> np.ndarray:
    """Return the order in which an epoch uses the samples of a table."""
    order: np.ndarray = window_order([num_samples], seed=seed, epoch=epoch)
    return order


def settings_for(data: int = 1, exchange: Mapping[str, Any] | None = None, **train: Any) -> ReplicaSettings:
    """Return the settings of a config file with these keys of `train`."""
    if "epochs" not in train:
        train.setdefault("steps", 1)
    chosen = {"batch_size": 32, "optimizer": {"type": "sgd", "lr": 0.1}, "precision": "float64", **train}
    strategy = {"network": {"data": data}, "exchange": {"type": "allreduce", **(exchange or {})}}
    config = load_train_config({"name": "survey", "task": {"type": "digits"}, "train": chosen, "strategy": strategy})
    return ReplicaSettings.from_config(config, storage="", model_directory="")


def stream_of(task: Any, settings: ReplicaSettings) -> Callable[[str, int], SampleStream]:
    """Return a function for the samples of each split as each rank sees them."""

    def stream(split: str, rank: int) -> SampleStream:
        training = split == "train"
        return SampleStream(
            open_split(task, split, num_endless=settings.num_endless),
            task.to_batch,
            to_training_batch=training_batch_of(task) if training else None,
            batch_size=settings.batch_size,
            rank=settings.share_of(rank),
            num_replicas=settings.num_replicas,
            accumulate=settings.accumulate if training else 1,
            seed=settings.seed_of(rank),
            shuffle=training,
            weigh=getattr(task, "weight", None),
            drop_last=training and settings.drop_last,
        )

    return stream


def train(
    task: Any,
    data: int = 1,
    *,
    load: Callable[[], Any] | None = None,
    checkpoints: CheckpointWriter | None = None,
    started_at: float | None = None,
    prepare: Callable[[Replica, Collective, list[tuple[str, int]]], None] | None = None,
    **config: Any,
) -> list[Trained]:
    """Train by the loop that the actors run, `data` replicas as threads; the result of each, in rank order.

    Args:
        load: the checkpoint to start from.
        checkpoints: makes rank 0 save with it.
        started_at: when the run began, seconds since the epoch.
        prepare: is called in each replica's thread before it trains, with the list of its collective operations.
        config: keys of `train` and `exchange`.
    """
    settings = settings_for(data, **config)
    # Building seeds the process-wide generator, so the replicas are built one after the other.
    watches = [Watch() for _ in range(data)]
    replicas = [Replica(task, settings, stream_of(task, settings), recorder=watch) for watch in watches]

    def run(collective: Collective) -> Trained:
        replica, watch = replicas[collective.rank], watches[collective.rank]
        calls: list[tuple[str, int]] = []
        watch.replica = replica
        replica.connect(collective, load)
        if collective.rank == 0 and checkpoints is not None:
            replica.write_checkpoints_with(checkpoints)
        log_operations(collective, calls)
        if prepare is not None:
            prepare(replica, collective, calls)
        before = state_of(replica.model)
        outcome = replica.run(time.time() if started_at is None else started_at)
        return Trained(replica, outcome, before, watch.steps, watch.weights, watch.optimizer, calls)

    return [run(SoloCollective())] if data == 1 else run_replicas(data, run)


def log_operations(collective: Collective, calls: list[tuple[str, int]]) -> None:
    """Note every all-reduce, all-gather and broadcast of this member, those of its siblings too."""
    start, gather, broadcast, sibling = (
        collective.start_all_reduce,
        collective.all_gather,
        collective.broadcast,
        collective.sibling,
    )

    def noting_start(tensor: Tensor, *rest: Any) -> Any:
        calls.append(("all_reduce", tensor.numel()))
        return start(tensor, *rest)

    def noting_gather(tensor: Tensor) -> Tensor:
        calls.append(("all_gather", tensor.numel()))
        return gather(tensor)

    def noting_broadcast(tensor: Tensor, source: int) -> None:
        calls.append(("broadcast", tensor.numel()))
        broadcast(tensor, source)

    known: set[int] = set()

    def noting_sibling(name: str) -> Collective:
        member = sibling(name)
        if member is not collective and id(member) not in known:
            known.add(id(member))
            log_operations(member, calls)
        return member

    collective.start_all_reduce = noting_start  # type: ignore[assignment, method-assign]
    collective.all_gather = noting_gather  # type: ignore[method-assign]
    collective.broadcast = noting_broadcast  # type: ignore[method-assign]
    collective.sibling = noting_sibling  # type: ignore[method-assign]


def furthest(left: State, right: State) -> float:
    """Return the largest difference between two states; they must hold the same names."""
    assert left.keys() == right.keys()
    return max(float((left[name].double() - right[name].double()).abs().max()) for name in left if left[name].numel())


def same_bits(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def digits(**arguments: Any) -> Task:
    """Return the built-in task, small."""
    task: Task = resolve("digits")(**{"hidden": [32], **arguments})
    return task


def few_digits(**arguments: Any) -> Task:
    """Return the built-in task for runs whose steps are compared: 36 samples are validated, of which 24 are a batch."""
    return digits(**{"hidden": [24, 16], "validation_fraction": 0.02, **arguments})


def regression(num_samples: int = 96, width: int = 5, seed: int = 0, depth: int = 2) -> Rows:
    """Return noisy values of a random function, learned by a small smooth network."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(num_samples, width))
    targets = np.sin(inputs @ rng.normal(size=width)) + 0.1 * rng.normal(size=num_samples)

    def model() -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(width, 8), nn.Tanh()]
        for _ in range(depth - 2):
            layers += [nn.Linear(8, 8), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(8, 1))

    return Rows(inputs, targets, model)
