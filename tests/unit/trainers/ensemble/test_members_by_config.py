"""Ensembles whose members differ by config: each is the run of its own config, and they answer together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from orchestray.platform.errors import CheckpointError, ConfigError
from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good, load_checkpoint
from orchestray.platform.run.directory import RunDirectory
from orchestray.platform.run.model_files import load_model_json, save_model
from orchestray.trainers import tasks
from orchestray.trainers.config.load import dump_yaml, load_train_config
from orchestray.trainers.config.members import member_config
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.core.members import member_seed
from orchestray.trainers.layout.degrees import Layout
from orchestray.trainers.loop.checkpoint_source import Loaded
from orchestray.trainers.loop.host import ReplicaHost
from orchestray.trainers.loop.replica import Replica
from orchestray.trainers.saved.model_json import describe_model
from orchestray.trainers.saved.run import load_run
from orchestray.trainers.saved.snapshots import average_snapshots, mean_tensors
from support.layouts import LaidOut, train_laid_out
from support.threads import run_replicas
from support.training import furthest, same_bits, stream_of

OWN: list[dict[str, Any]] = [
    {"train.optimizer.lr": 0.05},
    {"train.optimizer": {"type": "adam", "lr": 0.01}, "train.lr_schedule": {"type": "cosine", "warmup_steps": 2}},
    {"task.hidden": [8, 12, 6], "train.grad_clip": 0.5, "train.seed": 41},
]
TRAIN = {"batch_size": 48, "steps": 6, "optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.9}, "precision": "float64"}


def config_of(members: list[dict[str, Any]], network: dict[str, Any] | None = None, **exchange: Any) -> Any:
    strategy = {
        "network": {"data": len(members), **(network or {})},
        "exchange": {"type": "independent", "members": members, **exchange},
    }
    task = {"type": "digits", "hidden": [16], "dropout": 0.1}
    checkpoint = {"every_steps": 2, "keep": 3}
    return load_train_config(
        {"name": "a", "task": task, "train": TRAIN, "strategy": strategy, "checkpoint": checkpoint}
    )


def settings_of(config: Any) -> ReplicaSettings:
    return ReplicaSettings.from_config(config, storage="", model_directory="")


def trained(settings: ReplicaSettings, **rest: Any) -> LaidOut:
    def task_of(member: int) -> Any:
        return tasks.build(settings.task_of(member))

    return train_laid_out(lambda: tasks.build(settings.task), settings, task_of=task_of, **rest)


def member(weights: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    prefix = f"members.{index}."
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def alone(config: Any, index: int, *, seed: int, **changes: Any) -> LaidOut:
    """Train in one process by this member's config, with the seed given as any run's."""
    own = replace(settings_of(member_config(config, index)), seed=seed, **changes)
    return train_laid_out(lambda: tasks.build(own.task), own)


def test_each_member_is_the_run_of_its_own_config_and_seed_bit_for_bit() -> None:
    config = config_of(OWN)
    found = trained(settings_of(config))
    for index, seed in enumerate([0, member_seed(0, 1), 41]):
        assert same_bits(member(found.weights, index), alone(config, index, seed=seed).weights)


@pytest.mark.parametrize("network", [{"tensor": 2}, {"pipeline": 2, "microbatches": 2}])
def test_each_member_of_its_own_shape_may_be_laid_out_over_several_workers(network: dict[str, Any]) -> None:
    config = config_of([{"task.hidden": [8, 12]}, {"task.hidden": [10, 6, 4]}], network)
    found = trained(settings_of(config))
    for index, seed in enumerate([0, member_seed(0, 1)]):
        accumulate = 2 if "microbatches" in network else 1
        one = alone(config, index, seed=seed, layout=Layout(), accumulate=accumulate)
        assert furthest(member(found.weights, index), one.weights) <= 1e-12


def test_a_member_with_no_keys_is_a_member_of_an_ensemble_that_differs_by_seed() -> None:
    by_config, by_seed = config_of([{}, {}]), config_of([{}, {}])
    assert not settings_of(by_config).has_own_tasks
    plain = replace(settings_of(by_seed), members=())
    assert same_bits(trained(settings_of(by_config)).weights, trained(plain).weights)


@pytest.mark.parametrize("average", ["outputs", "probabilities"])
def test_the_validation_is_that_of_the_answer_of_members_of_several_shapes(average: str, tmp_path: Path) -> None:
    config = config_of(OWN, average=average)
    found, run = finished(config, tmp_path)
    validation: Any = found.outcome.final["validation"]
    model, task = run.load_model(), run.load_task()
    batch = task.to_batch(task.dataset("validation"))
    with torch.no_grad():
        logits = model.logits(batch["inputs"].double())
    assert validation["loss"] == pytest.approx(float(task.loss(logits, batch)), rel=1e-6)
    assert validation["accuracy"] == pytest.approx(float(task.metrics(logits, batch)["accuracy"]), abs=1e-6)


def finished(config: Any, folder: Path, *, keep: int = 3) -> tuple[LaidOut, Any]:
    """Train the run, and return it with what it leaves in its directory."""
    settings = settings_of(config)
    with RunDirectory.create(folder, "a") as directory:
        directory.write_config(dump_yaml(config))
        location = directory.paths.checkpoints
        found = trained(settings, checkpoints=lambda: CheckpointWriter(location, keep=keep))
        members = [tasks.build(settings.task_of(index)) for index in range(settings.num_members)]
        described = describe_model(settings, tasks.build(settings.task), members.__getitem__)
        save_model(directory.paths.model, found.weights, described)
    return found, load_run(folder / "a")


def test_the_trained_model_is_loaded_with_every_members_shape(tmp_path: Path) -> None:
    found, run = finished(config_of(OWN), tmp_path)
    told = load_model_json(run.path / "model")["ensemble"]
    assert [each["hidden"] for each in told["arguments"]] == [[16], [16], [8, 12, 6]]
    assert same_bits(dict(run.load_model().state_dict()), found.weights)


def test_the_trained_model_answers_with_the_mean_of_the_members_alone(tmp_path: Path) -> None:
    _, run = finished(config_of(OWN), tmp_path)
    model = run.load_model()
    inputs = torch.rand(7, 64, dtype=torch.float64)
    with torch.no_grad():
        expected = sum(own(inputs) for own in model.members) / 3
        assert float((model(inputs) - expected).abs().max()) <= 1e-12


def test_snapshots_of_members_of_several_shapes_are_averaged_member_by_member(tmp_path: Path) -> None:
    _, run = finished(config_of(OWN), tmp_path)
    states = [load_checkpoint(found)[0] for found in run.checkpoints()[-2:]]
    assert same_bits(dict(average_snapshots(run, last=2).state_dict()), mean_tensors(states))


def resumed(config: Any, folder: Path, then: Any) -> LaidOut:
    first = replace(settings_of(config), steps=3)
    trained(first, checkpoints=lambda: CheckpointWriter(folder, keep=1))

    def load() -> Loaded:
        found = latest_good(folder)[0]
        assert found is not None
        return Loaded(found)

    return trained(settings_of(then), load=load)


def test_a_resumed_ensemble_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    own = [{**each} for each in OWN]
    own[1]["train.lr_schedule"] = {"type": "step", "every_steps": 2, "gamma": 0.5}
    config = config_of(own)
    assert same_bits(resumed(config, tmp_path, config).weights, trained(settings_of(config)).weights)


def test_a_checkpoint_of_members_of_other_shapes_is_refused(tmp_path: Path) -> None:
    config = config_of([{"task.hidden": [8]}, {}])
    with pytest.raises(CheckpointError, match=r"members\.0|0\.weight"):
        resumed(config, tmp_path, config_of([{}, {}]))


class OwnData:
    """A task of the digits of which only some are used, or with another number of outputs."""

    def __init__(self, inner: Any, num_rows: int | None = None, num_outputs: int = 10) -> None:
        self._inner, self._num_rows, self._num_outputs = inner, num_rows, num_outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def dataset(self, split: str) -> Any:
        table = self._inner.dataset(split)
        return table if self._num_rows is None else table.slice(0, self._num_rows)

    def build_model(self) -> Any:
        return torch.nn.Linear(64, self._num_outputs)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"num_rows": 96}, r"their train data differ in samples: \d+ \(member 0\), 96 \(member 1\)"),
        (
            {"num_outputs": 12},
            r"member 0 answers with tensors of shapes \[\[\d+, 10\]\].*member 1 with \[\[\d+, 12\]\]",
        ),
    ],
)
def test_members_that_cannot_be_trained_or_answer_together_are_refused(own: dict[str, Any], said: str) -> None:
    settings = settings_of(config_of([{"task.hidden": [8]}, {}]))
    made = [OwnData(tasks.build(settings.task)), OwnData(tasks.build(settings.task), **own)]

    def stream(split: str, rank: int) -> Any:
        return stream_of(made[rank], settings)(split, rank)

    replicas = [Replica(made[0], settings, stream, task_of=lambda index: made[index]) for _ in range(2)]

    def run(world: Any) -> None:
        replicas[world.rank].connect(world)
        replicas[world.rank].run(0.0)

    with pytest.raises(ConfigError, match=said):
        run_replicas(2, run)


def test_a_worker_builds_the_task_of_its_member_and_no_other_twice() -> None:
    host = ReplicaHost(replace(settings_of(config_of(OWN)), checkpoint_storage=None))
    first, third = host._task_of(0), host._task_of(2)
    assert first is host._task_of(1)
    assert third is host._task_of(2)
    widths = [task.build_model()[0].out_features for task in (first, third)]
    assert widths == [16, 8]
    assert host._share_stream("train", 2).num_samples == host._share_stream("train", 0).num_samples
