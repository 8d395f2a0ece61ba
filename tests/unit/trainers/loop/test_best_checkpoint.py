"""The best checkpoint: kept besides the newest, exported, and never lost with a worker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.run.checkpoint import (
    CheckpointWriter,
    list_checkpoints,
    load_model_tensors,
)
from orchestray.platform.run.checkpoint_files import best_checkpoint
from orchestray.platform.task import TaskSource
from orchestray.trainers.config.goals import Best, Until
from orchestray.trainers.config.settings import ReplicaSettings, Start
from orchestray.trainers.layout.degrees import Layout
from orchestray.trainers.loop.checkpoint_source import newest
from orchestray.trainers.loop.host import ReplicaHost
from orchestray.trainers.loop.replica import Replica
from orchestray.trainers.saved.checkpoint_model import load_model
from support.layouts import layout_settings
from support.threads import run_replicas
from support.tiny_task import TinyTask
from support.training import stream_of

SETTINGS = ReplicaSettings(
    task=TaskSource(type="tiny", arguments={}, file=None, source=None),
    batch_size=10,
    epochs=3,
    steps=None,
    optimizer={"type": "sgd", "lr": 0.1, "momentum": 0.9},
    lr_schedule={"type": "constant", "warmup_steps": 0},
    precision="float64",
)

FIRST_IS_BEST = Best("loss", "max")
"""The loss falls, so that the first validation is the best and all later ones are worse."""


def make(settings: ReplicaSettings) -> Replica:
    task = TinyTask()
    return Replica(task, settings, stream_of(task, settings))


def settings_of(directory: Path, best: Best, **changes: Any) -> ReplicaSettings:
    return replace(
        SETTINGS, checkpoint_storage=str(directory), checkpoint_every_steps=5, checkpoint_keep=1, best=best, **changes
    )


def run(replica: Replica, collective: Collective, *, writer: type[CheckpointWriter] = CheckpointWriter) -> Replica:
    """Train as the host does, from the newest checkpoint."""
    storage = str(replica.settings.checkpoint_storage)
    replica.connect(collective, lambda: newest(storage, None))
    if collective.rank > 0:
        replica.run(started_at=0.0)
        return replica
    with writer(storage, keep=1) as checkpoints:
        replica.write_checkpoints_with(checkpoints)
        replica.run(started_at=0.0)
    return replica


def steps_in(directory: Path) -> list[int]:
    return [found.step for found in list_checkpoints(directory)]


def weights_after(num_steps: int, **changes: Any) -> dict[str, Tensor]:
    replica = make(replace(SETTINGS, epochs=None, steps=num_steps, **changes))
    replica.connect(SoloCollective())
    replica.run(started_at=0.0)
    return {name: tensor.detach().clone() for name, tensor in replica.trained_model().tensors.items()}


def assert_best_is_of_step(directory: Path, step: int, tolerance: float) -> None:
    found = best_checkpoint(directory)
    assert found is not None
    assert found.step == step
    for name, tensor in weights_after(step).items():
        torch.testing.assert_close(load_model(found).tensors[name], tensor, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("mode", "exchange", "data", "kept"),
    [
        ("max", {}, 1, [4, 12]),
        ("min", {}, 2, [12]),
        ("max", {}, 2, [4, 12]),
        ("max", {"shard": "optimizer"}, 2, [4, 12]),
    ],
)
def test_the_best_is_kept_besides_the_newest_with_the_weights_of_its_step(
    tmp_path: Path, mode: str, exchange: dict[str, Any], data: int, kept: list[int]
) -> None:
    settings = settings_of(tmp_path, Best("loss", mode), layout=Layout(data=data), exchange=exchange)
    replicas = [make(settings) for _ in range(data)]
    if data == 1:
        run(replicas[0], SoloCollective())
    else:
        run_replicas(data, lambda collective: run(replicas[collective.rank], collective))
    assert steps_in(tmp_path) == kept
    assert_best_is_of_step(tmp_path, kept[0], 1e-12)
    assert all(replica.position.summary()["best"]["checkpoint"] == f"step-{kept[0]:08d}" for replica in replicas)


def test_a_run_that_is_resumed_keeps_the_best_from_before(tmp_path: Path) -> None:
    run(make(settings_of(tmp_path, FIRST_IS_BEST, pause_at=9)), SoloCollective())
    assert steps_in(tmp_path) == [4, 9]
    again = run(make(settings_of(tmp_path, FIRST_IS_BEST)), SoloCollective())
    assert steps_in(tmp_path) == [4, 12]
    assert again.position.summary()["best"]["step"] == 4


def test_a_run_that_is_resumed_without_a_best_forgets_it(tmp_path: Path) -> None:
    run(make(settings_of(tmp_path, FIRST_IS_BEST, pause_at=9)), SoloCollective())
    again = run(make(replace(settings_of(tmp_path, FIRST_IS_BEST), best=None)), SoloCollective())
    assert steps_in(tmp_path) == [12]
    assert again.position.summary() == {}


class Dying(CheckpointWriter):
    """A writer whose process ends before the first checkpoint is on the disk."""

    def save_async(self, *_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt


@pytest.mark.parametrize(("until", "kept"), [(None, [4, 12]), (Until("loss", 100.0, "min"), [4])])
def test_a_writer_that_is_lost_as_it_saves_the_best_does_not_take_it_along(
    tmp_path: Path, until: Until | None, kept: list[int]
) -> None:
    settings = settings_of(tmp_path, FIRST_IS_BEST, layout=Layout(data=2), until=until)
    lost, survivor, new = (make(settings) for _ in range(3))

    def first(collective: Collective) -> None:
        try:
            if collective.rank == 0:
                with pytest.raises(KeyboardInterrupt):
                    run(lost, collective, writer=Dying)
                collective.abort()
            else:
                with pytest.raises(PeerLostError):
                    run(survivor, collective)
        finally:
            collective.abort()

    run_replicas(2, first)
    assert survivor.position.step == 4
    assert steps_in(tmp_path) == []
    second = [new, survivor]
    run_replicas(2, lambda collective: run(second[collective.rank], collective))
    assert steps_in(tmp_path) == kept
    assert_best_is_of_step(tmp_path, 4, 1e-12)


@pytest.mark.parametrize("export", [True, False])
def test_a_run_ends_with_the_model_of_the_best_checkpoint_if_it_is_to_be_exported(tmp_path: Path, export: bool) -> None:
    settings = replace(
        layout_settings(validate_every_steps=2),
        checkpoint_storage=str(tmp_path / "checkpoints"),
        model_directory=str(tmp_path / "model"),
        best=Best("loss", "max", export),
    )
    host = ReplicaHost(settings)
    host.train(Start(0.0))
    host.close()
    first, *_, last = list_checkpoints(tmp_path / "checkpoints")
    assert (first.step, first.step < last.step) == (2, True)
    expected, found = load_model(first if export else last).tensors, load_model_tensors(tmp_path / "model")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
