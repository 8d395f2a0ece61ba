"""Trials that are whole gangs: one ledger, and nothing of a trial left when it has ended, however it ended."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orchestray.platform.actors.pool import make_room
from orchestray.platform.errors import ConfigError
from orchestray.platform.run.metrics import read_lines
from orchestray.search.config.load import load_search_config
from orchestray.search.engine.run import run_search
from orchestray.search.results.writer import SearchRecords

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestray.platform.cluster.cluster import Cluster

SPACE = {
    "train.optimizer.lr": {"type": "log_uniform", "low": 0.01, "high": 0.3},
    "train.optimizer.momentum": {"type": "uniform", "low": 0.5, "high": 0.9},
}
MEMBERS = {"population": 2, "interval_steps": 4, "fraction": 0.5}
SAME = ("status", "steps", "config", "parent")


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


def searched(directory: Path, name: str, strategy: dict[str, Any], **search: Any) -> tuple[Any, Any]:
    """Search for the tiny task with the least loss; return the lines of its trials, and what each was made from."""
    task = {"type": "support.tiny_task:TinyTask"}
    wanted = nested(strategy, task, **{"objective": {"metric": "loss"}, "space": SPACE, **search})
    with SearchRecords.create(directory, name) as records:
        assert run_search(wanted, records).status == "succeeded"
        assert (records.paths.best / "model").is_dir()
        return dict(records.lines), read_lines(records.paths.lineage_log)


@pytest.mark.parametrize(
    ("strategy", "method", "trials"),
    [
        pytest.param(
            {"network": {"data": 2}}, {"type": "asha", "eta": 3, "grace_steps": 4}, 3, id="asha", marks=pytest.mark.slow
        ),
        pytest.param(
            {"network": {"pipeline": 2}},
            {"type": "population_based_training", "synchronous": True, **MEMBERS},
            2,
            id="population",
        ),
    ],
)
def test_gangs_are_stopped_held_and_copied_as_trials_of_one_process_are(
    cluster: Cluster, tmp_path: Path, strategy: dict[str, Any], method: dict[str, Any], trials: int
) -> None:
    before = live_groups()
    search = {"method": method, "budget": {"trials": trials}}
    gangs, of_gangs = searched(tmp_path, "gangs", strategy, **search)
    alone, of_alone = searched(tmp_path, "alone", {}, **search)
    assert live_groups() == before
    assert of_gangs == of_alone
    assert gangs.keys() == alone.keys()
    for trial, line in gangs.items():
        assert [line[key] for key in SAME] == [alone[trial][key] for key in SAME], trial
        assert line["objective"] == pytest.approx(alone[trial]["objective"], abs=1e-6)
    if method["type"] == "asha":
        assert sorted(line["status"] for line in gangs.values()) == ["stopped", "stopped", "succeeded"]
    if method["type"] == "population_based_training":
        assert {node["step"] for node in of_gangs if node["change"].startswith("copied trial")} == {4, 8}


def test_how_many_workers_train_can_be_searched_and_the_trials_of_one_and_two_score_the_same(
    cluster: Cluster, tmp_path: Path
) -> None:
    before = live_groups()
    space = {
        "strategy.network.data": {"type": "choice", "values": [1, 2]},
        "strategy.exchange.type": {"type": "choice", "values": ["allreduce", "parameter_server"]},
    }
    lines, _ = searched(tmp_path, "workers", {}, space=space)
    assert live_groups() == before
    assert [line["status"] for line in lines.values()] == ["succeeded"] * 4
    first = lines[0]["objective"]
    assert [line["objective"] for line in lines.values()] == pytest.approx([first] * 4, abs=1e-6)


@pytest.mark.slow
def test_a_member_of_a_population_goes_on_with_another_number_of_workers(cluster: Cluster, tmp_path: Path) -> None:
    before = live_groups()
    space = {**SPACE, "strategy.network.data": {"type": "choice", "values": [1, 2]}}
    method = {"type": "population_based_training", "synchronous": True, "explore": "resample", **MEMBERS}
    search = {"method": method, "budget": {"trials": 2}}
    lines, nodes = searched(tmp_path, "members", {}, space=space, **search)
    assert live_groups() == before
    assert [(line["status"], line["steps"], line["error"]) for line in lines.values()] == [("succeeded", 12, None)] * 2
    workers = [node["change"] for node in nodes]
    assert any("strategy.network.data" in change for change in workers), workers


@pytest.mark.slow
def test_gangs_under_a_stale_server_probe_from_the_one_that_trains_on(cluster: Cluster, tmp_path: Path) -> None:
    before = live_groups()
    strategy = {
        "network": {"data": 2},
        "exchange": {"type": "parameter_server", "consistency": "stale", "staleness": 2},
    }
    space = {"strategy.exchange.staleness": {"type": "choice", "values": [0, 2]}}
    method = {"type": "omnivore", "every_steps": 6, "probe_steps": 3}
    lines, nodes = searched(tmp_path, "omnivore", strategy, method=method, space=space)
    assert live_groups() == before
    assert sorted((line["status"], line["steps"]) for line in lines.values()) == [("stopped", 9), ("succeeded", 12)]
    (copied,) = (node for node in nodes if node["change"].startswith("probes from"))
    assert copied["step"] == 6
    assert {copied["trial"], copied["parent"]} == {0, 1}


@pytest.mark.slow
def test_failures_and_kills_of_nested_trials_leak_no_group(cluster: Cluster, tmp_path: Path) -> None:
    before = live_groups()
    values = ["raise", "killed", "fine"]
    wanted = nested(
        {"network": {"data": 2}},
        {"type": "support.odd_task:OddTask", "behaviour": "fine"},
        space={"task.behaviour": {"type": "choice", "values": values}},
    )
    with SearchRecords.create(tmp_path, "odd") as records:
        outcome = run_search(wanted, records)
        statuses = {line["config"]["task.behaviour"]: line["status"] for line in records.lines.values()}
    assert outcome.status == "succeeded"
    assert statuses == {"raise": "failed", "killed": "failed", "fine": "succeeded"}
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
        objective={"metric": "acuracy", "mode": "max"},
    )
    with SearchRecords.create(tmp_path, "misspelt") as records, pytest.raises(ConfigError, match="mean 'accuracy'"):
        run_search(wanted, records)
    assert live_groups() == before
