"""The whole loop under NCCL's rules, for every kind of layout: no order of events makes it wait, or changes a bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from orchestray.platform.comm.collective import Collective
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.loop.replica import Replica
from support.device_layouts import Normalised
from support.gpu_recovery import RunOnGpus
from support.layouts import layout_settings
from support.nccl import run_on_gpus
from support.tiny_task import TinyTask
from support.training import few_digits, same_bits, stream_of

SCHEDULES = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved_1f1b": 2,
    "zero_bubble": 1,
    "zbv": 2,
    "dual_pipe_v": 2,
    "pipedream": 1,
}
EQUAL = {"split": "equal"}
"""Measured times would cut at another layer from one run to the next, and PipeDream trains otherwise then."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"network": {"data": 3, "microbatches": 1}},
    "tensor": {"network": {"tensor": 2, "microbatches": 1}},
    "tensor and data": {"network": {"tensor": 2, "data": 2, "microbatches": 1}},
    "tensor and shards": {
        "network": {"tensor": 2, "data": 2, "microbatches": 1},
        "exchange": {"shard": "gradients"},
    },
    **{
        f"pipeline, {name}": {"network": {"pipeline": 2, "schedule": name, "stages_per_worker": stages, **EQUAL}}
        for name, stages in SCHEDULES.items()
    },
    "pipeline and data": {"network": {"pipeline": 2, "data": 2, **EQUAL}},
    "all three": {"network": {"pipeline": 2, "tensor": 2, "data": 2, **EQUAL}},
    "gossip": {"network": {"data": 4, "microbatches": 1}, "exchange": {"type": "gossip"}},
    # Within a step it sums in other groups than the gradients', forward and backward.
    "batch normalisation over replicas": {"network": {"data": 3, "microbatches": 2}, "task": Normalised},
    # Replicas divide an optimizer's work, and send each other its results.
    **{
        f"{kind} spread over replicas": {
            "network": {"data": 3, "microbatches": 1},
            "optimizer": {"type": kind, "lr": 0.01},
            "task": TinyTask,
        }
        for kind in ("kfac", "natural_gradient", "soap")
    },
}


def replicas_of(settings: ReplicaSettings, task: Callable[[], Any] = few_digits) -> list[Replica]:
    return [new_replica(settings, task()) for _ in range(settings.layout.size)]


def new_replica(settings: ReplicaSettings, task: Any = None) -> Replica:
    task = task or few_digits()
    return Replica(task, settings, stream_of(task, settings))


def trained(replica: Replica, world: Collective) -> dict[str, Tensor]:
    replica.connect(world)
    replica.run(0.0)
    return {name: tensor.clone() for name, tensor in replica.trained_model().tensors.items()}


def in_turn(replicas: list[Replica]) -> Callable[[Collective], dict[str, Tensor]]:
    """Return the program of each rank."""
    return lambda world: trained(replicas[world.rank], world)


@pytest.mark.parametrize("num_seeds", [2, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_to_the_same_bits_in_any_order_and_never_stands_still(name: str, num_seeds: int) -> None:
    keys: dict[str, Any] = {"steps": 2, "optimizer": {"type": "sgd", "lr": 0.1}, "task": few_digits, **LAYOUTS[name]}
    task = keys.pop("task")
    settings = layout_settings(**keys)
    first: dict[str, Tensor] = {}
    for seed in range(num_seeds):
        room = (None, 1)[seed % 2]
        found, gpus = run_on_gpus(settings.layout.size, in_turn(replicas_of(settings, task)), seed=seed, room=room)
        first = first or found[0]
        assert same_bits(found[0], first), seed
        assert not [known for known in gpus.communicators if " " in known], "no communicator of a pair"


@pytest.mark.parametrize("num_seeds", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_replicas_that_lose_others_end_with_the_bits_of_a_run_without_a_loss(num_seeds: int) -> None:
    torch.set_num_threads(1)
    settings = layout_settings({"data": 3, "microbatches": 1}, steps=4)
    undisturbed = run_on_gpus(3, in_turn(replicas_of(settings)))[0][0]
    killed = 0
    for seed in range(num_seeds):
        run = RunOnGpus(seed, 3, lambda: new_replica(settings), trained, num_deaths=1 + seed % 2, until_s=25.0)
        for found in run.run():
            assert same_bits(found, undisturbed), seed
        killed += run.num_killed
    assert killed >= num_seeds


STAGED = {
    "stages": {"pipeline": 2},
    "stages with two parts each": {"pipeline": 2, "schedule": "dual_pipe_v", "stages_per_worker": 2},
    "stages of two replicas": {"pipeline": 2, "data": 2},
    "stages of tensor groups": {"pipeline": 2, "tensor": 2},
}


@pytest.mark.parametrize("num_seeds", [2, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", STAGED)
def test_stages_that_lose_others_begin_again_and_end_with_the_same_bits(name: str, num_seeds: int) -> None:
    torch.set_num_threads(1)
    settings = layout_settings({**STAGED[name], **EQUAL}, steps=2)
    size = settings.layout.size
    undisturbed = run_on_gpus(size, in_turn(replicas_of(settings)))[0][0]
    killed = 0
    for seed in range(num_seeds):
        run = RunOnGpus(
            seed,
            size,
            lambda: new_replica(settings),
            trained,
            num_deaths=1 + seed % 2,
            until_s=25.0,
            abort=Replica.abort,
        )
        assert same_bits(run.run()[0], undisturbed), seed  # the first worker has the whole model
        killed += run.num_killed
    assert killed >= num_seeds
