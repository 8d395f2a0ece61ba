"""Trials that are whole gangs: one ledger, and nothing of a trial left when it has ended, however it ended."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orchestray.platform.config.search.load import load_search_config
from orchestray.platform.errors import ConfigError
from orchestray.platform.gang.pool import make_room
from orchestray.search.engine.run import run_search
from orchestray.search.records.writer import SearchRecords

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestray.platform.cluster.cluster import Cluster


@pytest.fixture(scope="module", autouse=True)
def _give_back(cluster: Cluster) -> Iterator[None]:
    make_room(cluster)
    yield
    make_room(cluster)


def nested(strategy: dict[str, Any], task: dict[str, Any], **search: Any) -> Any:
    train = {"batch_size": 8, "steps": 12, "optimizer": {"type": "sgd", "lr": 0.1}}
    return load_search_config(
        {
            "name": "nested",
            "base": {"name": "trial", "task": task, "train": train, "strategy": strategy, "max_restarts": 0},
            "search": {"method": {"type": "grid"}, "objective": {"metric": "accuracy"}, **search},
        }
    )


def live_groups() -> list[str]:
    from ray.util import placement_group_table

    return [name for name, group in placement_group_table().items() if group["state"] != "REMOVED"]


@pytest.mark.parametrize("kind", ["allreduce", "parameter_server"])
def test_a_trial_of_two_workers_scores_as_one_of_one_and_leaves_no_group(
    cluster: Cluster, tmp_path: Path, kind: str
) -> None:
    before = live_groups()
    scores = []
    space = {"train.optimizer.lr": {"type": "choice", "values": [0.1, 0.3]}}
    task = {"type": "support.tiny_task:TinyTask"}
    for strategy in ({"network": {"data": 2}, "exchange": {"type": kind}}, {}):
        name = f"nested-{len(scores)}"
        with SearchRecords.create(tmp_path, name) as records:
            run_search(nested(strategy, task, space=space), records)
            scores.append([records.lines[trial]["objective"] for trial in (0, 1)])
            assert (records.paths.best / "model").is_dir()
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)
    assert live_groups() == before


def test_failures_and_kills_of_nested_trials_leak_no_group(cluster: Cluster, tmp_path: Path) -> None:
    before = live_groups()
    values = ["fine", "raise", "killed", "fine again"]
    wanted = nested(
        {"network": {"data": 2}},
        {"type": "support.odd_task:OddTask", "behaviour": "fine"},
        space={"task.behaviour": {"type": "choice", "values": values}},
    )
    with SearchRecords.create(tmp_path, "odd") as records:
        outcome = run_search(wanted, records)
        statuses = {line["config"]["task.behaviour"]: line["status"] for line in records.lines.values()}
    assert outcome.status == "succeeded"
    assert statuses == {"fine": "succeeded", "raise": "failed", "killed": "failed", "fine again": "succeeded"}
    assert live_groups() == before


def test_a_search_that_is_stopped_amid_a_nested_trial_leaks_no_group(cluster: Cluster, tmp_path: Path) -> None:
    before = live_groups()
    stop = threading.Event()
    wanted = nested(
        {"network": {"data": 2}},
        {"type": "support.odd_task:OddTask", "behaviour": "slow"},
        space={"train.optimizer.lr": {"type": "choice", "values": [0.1, 0.3]}},
        budget={"steps_per_trial": 100000},
    )
    with SearchRecords.create(tmp_path, "stopped") as records:
        outcome = run_search(wanted, records, stop=stop, on_change=lambda _change: stop.set())
    assert outcome.status == "interrupted"
    assert live_groups() == before


def test_a_misspelt_objective_ends_a_search_of_gangs_before_one_has_trained(cluster: Cluster, tmp_path: Path) -> None:
    before = live_groups()
    wanted = nested(
        {"network": {"data": 2}},
        {"type": "support.odd_task:OddTask", "behaviour": "killed"},
        space={"train.optimizer.lr": {"type": "choice", "values": [0.1, 0.3]}},
        objective={"metric": "acuracy"},
    )
    with SearchRecords.create(tmp_path, "misspelt") as records, pytest.raises(ConfigError, match="mean 'accuracy'"):
        run_search(wanted, records)
    assert live_groups() == before
