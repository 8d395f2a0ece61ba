"""Measurements are made once, in processes that may fail, and are kept by what they depend on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.platform.task import TaskSource
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.planning.measuring import Measurements, Wanted

VERSIONS = {"torch": "1"}


def wanted(strategy: dict[str, object], kind: str = "dry_run", at_once: int = 2) -> Wanted:
    config = load_train_config(
        {
            "task": {"type": "digits", "hidden": [16]},
            "train": {"batch_size": 32, "steps": 100, "optimizer": {"type": "sgd", "lr": 0.1}},
            "strategy": strategy,
        }
    )
    return Wanted(kind, ReplicaSettings.from_config(config, storage="", model_directory=""), 1, at_once)


def test_workers_that_measure_at_once_are_measured_once(tmp_path: Path) -> None:
    first, second = (Measurements(tmp_path, VERSIONS, 10_000) for _ in range(2))  # nothing disturbs all of them
    two = wanted({"network": {"data": 2}})
    found = first.dry_runs(two)
    assert len(found) == 2
    assert first.dry_runs(two) == second.dry_runs(two) == found
    assert (first.num_made, second.num_made) == (1, 0)
    assert second.knows(two)
    assert not Measurements(tmp_path, {"torch": "2"}, 1).knows(two)


def test_a_measurement_that_cannot_be_kept_is_used_all_the_same(tmp_path: Path) -> None:
    layers = wanted({"network": {"pipeline": 2}}, "profile")
    (tmp_path / f"{layers.key(VERSIONS)}.json").mkdir()  # as a disk that is full: nothing can be written there
    measurements = Measurements(tmp_path, VERSIONS, 10_000)
    assert len(measurements.profiles(layers)) == 2
    assert measurements.num_disturbed == 0


def test_a_measurement_that_others_disturb_is_made_three_times_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurements = Measurements(tmp_path, VERSIONS, 0)  # without cores every other program is too much
    made: list[Wanted] = []
    measure = measurements._from_processes

    def counted(layers: Wanted) -> list[dict[str, object]]:
        made.append(layers)
        return measure(layers)

    monkeypatch.setattr(measurements, "_from_processes", counted)
    measurements.profiles(wanted({"network": {"pipeline": 2}}, "profile"))
    assert len(made) == 3
    assert (measurements.num_made, measurements.num_disturbed) == (1, 1)
    assert [*tmp_path.iterdir()] == []


def test_the_key_depends_on_what_changes_a_step_and_on_nothing_else() -> None:
    one = wanted({"network": {"data": 2}})
    key = one.key(VERSIONS)
    for same in ({"steps": 7}, {"seed": 3}, {"checkpoint_every_steps": 1}, {"batch_schedule": {"type": "steps"}}):
        assert replace(one, settings=replace(one.settings, **same)).key(VERSIONS) == key  # type: ignore[arg-type]
    for other in ({"batch_size": 33}, {"recompute": "blocks"}, {"precision": "bfloat16"}, {"task": _other_task()}):
        assert replace(one, settings=replace(one.settings, **other)).key(VERSIONS) != key  # type: ignore[arg-type]
    assert replace(one, num_threads=2).key(VERSIONS) != key
    assert replace(one, at_once=1).key(VERSIONS) != key


def test_schedules_of_a_pipeline_share_the_profile_of_its_layers() -> None:
    keys = {
        wanted({"network": {"pipeline": 2, "schedule": schedule, "microbatches": 4}}, "profile").key(VERSIONS)
        for schedule in ("gpipe", "1f1b", "zero_bubble")
    }
    assert len(keys) == 1


def test_a_scheme_that_does_not_fit_the_model_says_why_each_time(tmp_path: Path) -> None:
    measurements = Measurements(tmp_path, VERSIONS, 2)
    for _ in range(2):
        with pytest.raises(ConfigError, match="no block of independent branches"):
            measurements.dry_runs(wanted({"network": {"tensor": 2, "plan": "branches"}}))
    assert measurements.num_made == 1


def test_a_process_that_dies_is_an_error_and_not_a_wait(tmp_path: Path) -> None:
    file = tmp_path / "dies.py"
    methods = ("dataset(self, split)", "to_batch(self, columns)", "loss(self, outputs, batch)", "build_model(self)")
    bodies = [f"    def {method}: os._exit(3)\n" for method in (*methods, "metrics(self, outputs, batch)")]
    file.write_text("import os\nclass Dies:\n" + "".join(bodies), encoding="utf-8")
    one = wanted({})
    task = TaskSource.of_class(f"{file}:Dies", {})
    with pytest.raises(TrainingError, match="its process ended, perhaps for want of memory"):
        Measurements(None, VERSIONS, 2).dry_runs(replace(one, settings=replace(one.settings, task=task), at_once=2))


def _other_task() -> TaskSource:
    return TaskSource.from_config(
        load_train_config(
            {
                "task": {"type": "digits", "hidden": [17]},
                "train": {"batch_size": 1, "steps": 1, "optimizer": {"type": "sgd", "lr": 1.0}},
            }
        ).task
    )


@pytest.mark.parametrize(
    "exchange",
    [
        {"consistency": "synchronous"},
        {"consistency": "asynchronous", "shards": 2},
        {"consistency": "asynchronous", "transport": "shared_memory"},
    ],
)
def test_a_worker_is_measured_with_its_parameter_servers(exchange: dict[str, object]) -> None:
    measurements = Measurements(None, VERSIONS, 10_000)
    found = measurements.served(
        wanted({"network": {"data": 2}, "exchange": {"type": "parameter_server", **exchange}}, "served", at_once=1)
    )
    assert found.compute_s > 0.0
    assert found.worker_cpu_s > 0.0
    assert found.round_s >= 0.0
    assert found.service_s >= 0.0
    assert found.server_cpu_s > 0.0
    assert found.grown_bytes > 2**20
    assert found.server_grown_bytes > 2**20
    assert measurements.num_made == 1
