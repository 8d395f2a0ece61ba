"""A training config in a user's own `tune.Tuner`: values in, metrics and checkpoints out, and nothing lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import orchestray
from orchestray.platform.actors.pool import make_room
from orchestray.platform.errors import ConfigError
from orchestray.search import trainable, tune_scheduler, tune_searcher
from orchestray.search.engine import tune_faults
from orchestray.search.spaces.dimensions import make_dimension
from support.cli import TIMEOUT_S, beside

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestray.platform.cluster.cluster import Cluster

LR = "train.optimizer.lr"


@pytest.fixture(scope="module", autouse=True)
def _give_back(cluster: Cluster) -> Iterator[None]:
    make_room(cluster)
    tune_faults.mend()
    yield
    make_room(cluster)


def config(**more: Any) -> dict[str, Any]:
    train = {"batch_size": 8, "steps": 12, "validate_every_steps": 4, "optimizer": {"type": "adam", "lr": 0.1}}
    return {"name": "tiny", "task": {"type": "support.tiny_task:TinyTask", "dropout": 0.2}, "train": train, **more}


def fit(trained: Any, folder: Path, **settings: Any) -> Any:
    from ray import tune

    space = settings.pop("param_space", None)
    at_end = tune.CheckpointConfig(checkpoint_at_end=True)
    run = tune.RunConfig(storage_path=str(folder), name="own", verbose=0, checkpoint_config=at_end)
    tune_config = tune.TuneConfig(reuse_actors=True, **settings)
    results = tune.Tuner(trained, param_space=space, tune_config=tune_config, run_config=run).fit()
    assert not results.errors
    return results


@pytest.mark.parametrize("workers", [1, 2])
def test_a_trial_is_the_training_of_its_config_and_its_checkpoint_becomes_its_run(
    cluster: Cluster, tmp_path: Path, workers: int
) -> None:
    from ray import tune

    given = config(strategy={"network": {"data": workers}})
    trained = trainable(given)
    results = fit(trained, tmp_path, param_space={LR: tune.grid_search([0.05, 0.2])}, metric="accuracy", mode="max")
    best = results.get_best_result()
    assert best.config.keys() == {LR}
    assert [result.metrics["step"] for result in results] == [12, 12]
    assert best.metrics["training_iteration"] == 3
    run = trained.save_run(best.checkpoint, tmp_path / "best")
    alone = orchestray.train(given, overrides=[f"{LR}={best.config[LR]}"], runs_dir=tmp_path, name="alone")
    assert best.metrics["loss"] == alone.result["final"]["validation"]["loss"]
    ours, theirs = run.load_model().state_dict(), alone.load_model().state_dict()
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_population_based_training_copies_the_states_of_a_training_config(cluster: Cluster, tmp_path: Path) -> None:
    searcher = tune_searcher(
        "population_based_training",
        {LR: make_dimension("log_uniform", low=1e-4, high=1.0)},
        metric="accuracy",
        time="step",
        trials=4,
        population=4,
        interval_steps=4,
        steps_per_trial=12,
        synchronous=True,
        seed=2,
    )
    results = fit(
        trainable(config()), tmp_path, search_alg=searcher, scheduler=tune_scheduler(searcher), num_samples=-1
    )
    copies = {number: standing.taken for number, standing in searcher.session.trials.items() if standing.taken}
    assert copies
    assert [result.metrics["step"] for result in results] == [12] * 4
    now = {searcher.numbers[result.metrics["trial_id"]]: result.config[LR] for result in results}
    assert now == {number: standing.changes[LR] for number, standing in searcher.session.trials.items()}


def test_a_value_that_the_config_refuses_is_a_failed_trial_with_the_reason(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"a trial with train\.optimizer\.lr=-1: train\.optimizer\.lr: must be > 0, got -1$"
    ):
        trainable(config()).trial_config({LR: -1})


def test_a_gang_in_resources_without_a_place_for_each_worker_is_a_failed_trial(
    cluster: Cluster, tmp_path: Path
) -> None:
    from ray import tune

    made = tune.with_resources(trainable(config(strategy={"network": {"data": 2}})), {"cpu": 2})
    run = tune.RunConfig(storage_path=str(tmp_path), name="own", verbose=0)
    (result,) = tune.Tuner(made, run_config=run).fit()
    assert "this trial has 2 workers, each in a bundle with CPU: 1 of its own" in str(result.error)


TUNER = """
import sys

import ray
from ray import tune

from orchestray.search import trainable, tune_scheduler, tune_searcher
from orchestray.search.spaces.dimensions import make_dimension

config, address, *folders = sys.argv[1:]
ray.init(address, log_to_driver=False)
trained = trainable(config)


def fit(folder):
    if tune.Tuner.can_restore(folder + "/own"):
        return tune.Tuner.restore(folder + "/own", trained).fit()
    space = {"train.optimizer.lr": make_dimension("choice", values=[0.05, 0.1, 0.2])}
    searcher = tune_searcher("asha", space, metric="accuracy", time="step", trials=3, steps_per_trial=24, grace_steps=8)
    every = tune.CheckpointConfig(checkpoint_frequency=1)
    run = tune.RunConfig(storage_path=folder, name="own", verbose=0, checkpoint_config=every)
    scheduler = tune_scheduler(searcher)
    settings = tune.TuneConfig(search_alg=searcher, scheduler=scheduler, num_samples=-1, reuse_actors=True)
    return tune.Tuner(trained, tune_config=settings, run_config=run).fit()


for folder in folders:
    for result in fit(folder):
        print(folder, result.config["train.optimizer.lr"], result.metrics["step"], result.metrics["loss"])
"""


@pytest.mark.slow
def test_a_tuner_that_is_killed_is_restored_and_comes_to_the_same(cluster: Cluster, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    task = {"type": "support.slow_digits:SlowDigits", "hidden": [16], "slow": str(slow), "quick": 20}
    given = config(task=task)
    given["train"] |= {"steps": 24, "validate_every_steps": 4, "batch_size": 32}
    (tmp_path / "config.yaml").write_text(json.dumps(given))
    (tmp_path / "tuner.py").write_text(TUNER)
    environment = {**os.environ, **beside(cluster), "TUNE_GLOBAL_CHECKPOINT_S": "0.1"}

    def start(*folders: str) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "tuner.py",
            "config.yaml",
            cluster.address,
            *map(str, map(tmp_path.joinpath, folders)),
        ]
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)

    killed = start("killed")
    until_s = time.monotonic() + TIMEOUT_S
    while len(list((tmp_path / "killed").glob("own/*/checkpoint_*"))) < 5 and time.monotonic() < until_s:
        time.sleep(0.05)
    killed.kill()
    killed.communicate()
    slow.unlink()
    both = start("killed", "whole")
    out, _ = both.communicate(timeout=TIMEOUT_S)
    assert both.returncode == 0
    restored, whole = (
        sorted(line.split(" ", 1)[1] for line in out.splitlines() if line.startswith(str(tmp_path / folder)))
        for folder in ("killed", "whole")
    )
    assert len(whole) == 3
    assert restored == whole
