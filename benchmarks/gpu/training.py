"""Trainings on a device in this process, by the product's loop and without Ray."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.data.source import open_split
from orchestray.platform.run.recorder import Recorder
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.loop.replica import Replica
from orchestray.trainers.loop.task_stream import task_stream
from orchestray.trainers.tasks import resolve

DIGITS = {"type": "digits", "hidden": [64, 64]}
TEXT = {"type": "python_source", "context": 64, "width": 64, "depth": 2, "heads": 4, "num_files": 4}


class Timed(Recorder):
    """A recorder that notes when a step's line came, and calls a function then."""

    def __init__(self, on_step: Callable[[int], None] = lambda _: None) -> None:
        super().__init__()
        self.at_s: dict[int, float] = {}
        self._on_step = on_step

    def record(self, line: dict[str, Any]) -> None:
        super().record(line)
        if "loss" in line and "split" not in line:
            self.at_s[line["step"]] = time.perf_counter()
            self._on_step(line["step"])


def replica_of(
    task: Mapping[str, Any],
    device: torch.device,
    *,
    recorder: Recorder | None = None,
    strategy: Mapping[str, Any] | None = None,
    **train: Any,
) -> Replica:
    """Return a replica that is not connected yet.

    Args:
        task: task section of a config.
        device: device of the model.
        recorder: receives the metric lines.
        strategy: strategy section of a config.
        train: keys of the train section.
    """
    keys = {"batch_size": 32, "steps": 50, "optimizer": {"type": "sgd", "lr": 0.05}, "validate_every_steps": 10**9}
    data = {"name": "check", "task": dict(task), "train": {**keys, **train}, "strategy": dict(strategy or {})}
    settings = ReplicaSettings.from_config(load_train_config(data), storage="", model_directory="")
    settings.arithmetic.apply()  # as a worker does
    built = resolve_task(task)

    def stream(split: str, rank: int) -> Any:
        source = open_split(built, split, num_endless=settings.num_endless)
        part, parts = settings.share_of(rank), settings.num_replicas
        return task_stream(built, source, split, settings, part=part, num_parts=parts, seed=settings.seed_of(rank))

    return Replica(built, settings, stream, recorder=recorder or Timed(), device=device)


def resolve_task(task: Mapping[str, Any]) -> Any:
    """Return the task of a task section."""
    arguments = {key: value for key, value in task.items() if key != "type"}
    return resolve(task["type"])(**arguments)


def trained(replica: Replica, world: Collective | None = None) -> dict[int, float]:
    """Train, and return the loss of each step."""
    replica.connect(SoloCollective() if world is None else world)
    replica.run(time.time())
    return {line["step"]: line["loss"] for line in replica.recorder.since(0) if "loss" in line and "split" not in line}


def weights_of(replica: Replica) -> dict[str, Tensor]:
    """Return the whole model's weights on the CPU; every worker of the layout calls this."""
    return {name: tensor.detach().cpu().clone() for name, tensor in replica.trained_model().tensors.items()}


def largest_difference(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> float:
    """Return the largest difference between two sets of losses or tensors with the same keys."""
    assert one.keys() == other.keys()
    return max(float((torch.as_tensor(one[key]) - torch.as_tensor(other[key])).abs().max()) for key in one)
