"""Runs of the real training loop under any layout, workers as threads over real connections."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.process.alike import ALONE
from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.platform.run.recorder import Recorder
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.core import rng
from orchestray.trainers.core.outcome import Outcome
from orchestray.trainers.core.rng import draws
from orchestray.trainers.loop.checkpoint_source import Loaded
from orchestray.trainers.loop.replica import Replica
from support.threads import TIMEOUT_S, run_replicas
from support.training import stream_of


@dataclass
class LaidOut:
    """Losses, weights and events of a run."""

    losses: list[float]
    """Loss of each step of this run."""
    weights: dict[str, Tensor]
    """The plain model's."""
    outcome: Outcome
    events: list[dict[str, Any]] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    """Metric lines of the steps."""
    validation: float | None = None
    """Loss of the last validation; None: there was none."""


def layout_settings(
    network: Mapping[str, Any] | None = None,
    exchange: Mapping[str, Any] | None = None,
    compression: Mapping[str, Any] | None = None,
    aggregation: Mapping[str, Any] | None = None,
    **train: Any,
) -> ReplicaSettings:
    """Return the settings of a config with these keys of `strategy.network` and so on, and of `train`."""
    chosen = {"batch_size": 24, "optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.9}, "precision": "float64"}
    if "solver" in train:
        del chosen["optimizer"]
    strategy = {
        "network": {"microbatches": 4, **(network or {})},
        "exchange": {"type": "allreduce", **(exchange or {})},
    }
    given = {"compression": compression, "aggregation": aggregation}
    strategy |= {section: dict(keys) for section, keys in given.items() if keys}
    data = {"name": "layout", "task": {"type": "digits"}, "strategy": strategy}
    config = load_train_config({**data, "train": {"steps": 3, **chosen, **train}})
    return ReplicaSettings.from_config(config, storage="", model_directory="")


def train_laid_out(
    task: Callable[[], Any],
    settings: ReplicaSettings,
    *,
    checkpoints: Callable[[], CheckpointWriter] | None = None,
    load: Callable[[], Loaded | None] | None = None,
    task_of: Callable[[int], Any] | None = None,
    device: torch.device | str = "cpu",
) -> LaidOut:
    """Train; every worker of the layout is a thread.

    Args:
        task: makes the task.
        settings: of the run.
        checkpoints: what rank 0 saves with.
        load: finds the checkpoint to start from.
        task_of: what a member of an ensemble learns, where that is not `task`.
        device: of the model.
    """
    size = settings.layout.size
    recorders = [Recorder() for _ in range(size)]
    # Building seeds the process-wide generator, so the replicas are built one after the other.
    tasks = [task() for _ in range(size)]
    replicas = [
        Replica(own, settings, stream_of(own, settings), recorder=recorder, task_of=task_of, device=device)
        for own, recorder in zip(tasks, recorders, strict=True)
    ]

    # To check what it has assembled a replica seeds that generator too: none may train, and draw, meanwhile.
    assembled = threading.Barrier(size)

    def run(world: Collective) -> tuple[Outcome, dict[str, Tensor]]:
        replica = replicas[world.rank]
        try:
            replica.connect(world, load)
            assembled.wait(TIMEOUT_S)
        except threading.BrokenBarrierError:
            raise PeerLostError("another replica has failed") from None
        except BaseException:
            assembled.abort()
            raise
        draw_one_at_a_time(replica.model)
        if world.rank == 0 and checkpoints is not None:
            with checkpoints() as writer:
                replica.write_checkpoints_with(writer)
                outcome = replica.run(time.time())
        else:
            outcome = replica.run(time.time())
        return outcome, {name: tensor.clone() for name, tensor in replica.trained_model().tensors.items()}

    with seeding_alone():
        outcome, weights = run(SoloCollective()) if size == 1 else run_replicas(size, run)[0]
    lines = [line for line in recorders[0].since(0) if "loss" in line and "split" not in line]
    events = [line for line in recorders[0].since(-1) if "event" in line]
    validation = (outcome.final.get("validation") or {}).get("loss")
    return LaidOut([line["loss"] for line in lines], weights, outcome, events, lines, validation)


def train_and_keep(
    task: Callable[[], Any], settings: ReplicaSettings, folder: Path, step: int
) -> tuple[LaidOut, Callable[[], Loaded]]:
    """Train, and return with the run a function that loads what it saved after `step`, for one that resumes from there.

    So nothing need be trained twice to have both a run and the first part of it.
    """
    whole = train_laid_out(
        task, replace(settings, checkpoint_every_steps=step), checkpoints=lambda: CheckpointWriter(folder, keep=99)
    )
    while (found := latest_good(folder)[0]) is not None and found.step > step:
        shutil.rmtree(folder / found.name)
    assert found is not None
    assert found.step == step
    return whole, lambda: Loaded(found)


@contextlib.contextmanager
def seeding_alone() -> Iterator[None]:
    """Let no thread seed while another builds a model: threads share torch's generator, processes do not."""
    seed = rng._seed

    def seed_alone(value: int, device: torch.device) -> None:
        with ALONE:
            seed(value, device)

    with mock.patch.object(rng, "_seed", seed_alone):
        yield


def draw_one_at_a_time(model: nn.Module) -> None:
    """Let one thread at a time seed and draw, or check a model."""
    for module in model.modules():
        if draws(module):
            module.register_forward_pre_hook(lambda *_: ALONE.acquire() and None, prepend=True)
            module.register_forward_hook(lambda *_: ALONE.release(), always_call=True)


def held_elements(task: Callable[[], Any], settings: ReplicaSettings) -> tuple[int, list[int]]:
    """Return the number of elements of the plain model's parameters, and of those that each worker holds."""
    tasks = [task() for _ in range(settings.layout.size)]
    replicas = [Replica(own, settings, stream_of(own, settings)) for own in tasks]

    def count(replica: Replica) -> int:
        return sum(parameter.numel() for parameter in replica.model.parameters())

    whole = count(replicas[0])

    def run(world: Collective) -> int:
        replicas[world.rank].connect(world)
        return count(replicas[world.rank])

    return whole, run_replicas(settings.layout.size, run)
