"""HOGWILD through Ray: workers and servers that are killed, and where everybody is placed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from orchestray.platform.actors.placement import Shape, node_for_all
from orchestray.platform.actors.pool import make_room
from orchestray.platform.errors import ClusterError
from support.cli import read_lines
from support.slow_digits import SMALL_SHARE, slowly
from support.under_way import UnderWay

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestray.platform.cluster.cluster import Cluster

EPOCHS, STEPS_AN_EPOCH = 5, 90
CHECKPOINT_EVERY = 50
CONFIG: dict[str, Any] = {
    "name": "hogwild",
    "task": {"type": "digits", "hidden": [16]},
    "train": {"batch_size": 16, "epochs": EPOCHS, "optimizer": {"type": "sgd", "lr": 0.1}},
    "checkpoint": {"every_steps": CHECKPOINT_EVERY},
    "strategy": {
        "network": {"data": 2},
        "exchange": {"type": "parameter_server", "consistency": "asynchronous", "transport": "shared_memory"},
    },
}


@pytest.fixture(scope="module", autouse=True)
def _give_back(cluster: Cluster) -> Iterator[None]:
    yield
    make_room(cluster)


def begin(runs: Path, name: str) -> tuple[UnderWay, Path]:
    """Begin a run that is slow once it has a checkpoint; return it, and the file to remove to end that."""
    slowed, slow = slowly(runs, CHECKPOINT_EVERY, share=SMALL_SHARE)
    running = UnderWay(CONFIG, runs, slowed, name=name)
    running.until("a checkpoint", lambda: running.events("checkpoint_saved"))
    return running, slow


def assert_every_step_once(running: UnderWay) -> None:
    steps = [line["step"] for line in read_lines(running.path / "metrics.jsonl") if "split" not in line]
    assert steps == list(range(1, EPOCHS * STEPS_AN_EPOCH + 1))
    assert running.result()["final"]["validation"]["accuracy"] > 0.8


def test_a_killed_worker_is_replaced_while_the_other_goes_on_and_every_share_is_done_once(
    cluster: Cluster, tmp_path: Path
) -> None:
    running, slow = begin(tmp_path, "worker")
    running.kill(1)
    lost = running.until("the loss noticed", lambda: running.events("worker_lost"))[0]["time_s"]

    def returns() -> list[float]:
        return [e["time_s"] for e in running.events("worker_started") if e["rank"] == 1 and e["time_s"] > lost]

    back = running.until("the replacement", returns)
    slow.unlink()
    running.finish()
    assert_every_step_once(running)
    result = running.result()
    assert (result["status"], result["restarts"]) == ("succeeded", 1)
    assert result["updates"] == 2 * EPOCHS * STEPS_AN_EPOCH
    assert 0 <= result["lost_updates"] < 0.01 * result["updates"]
    assert sum(result["staleness"]["histogram"].values()) == result["updates"]
    lines = read_lines(running.path / "metrics.jsonl")
    assert [line for line in lines if lost < line["time_s"] < min(back, default=1e9)]


def test_a_killed_server_takes_its_memory_along_and_the_run_goes_on_from_the_last_checkpoint(
    cluster: Cluster, tmp_path: Path
) -> None:
    running, slow = begin(tmp_path, "server")
    running.kill(0, "parameter_server")
    slow.unlink()
    running.finish()
    assert_every_step_once(running)
    assert [event["role"] for event in running.events("worker_lost")] == ["parameter_server"]


# -- one node for all --------------------------------------------------------------------------------------------------


def nodes(*cpus: float) -> Cluster:
    """Return a cluster with nodes of these numbers of CPUs."""
    described = [
        {"NodeManagerAddress": f"10.0.0.{number}", "Resources": {"CPU": count}} for number, count in enumerate(cpus)
    ]
    return cast("Cluster", SimpleNamespace(nodes=lambda: described))


def test_all_are_placed_on_a_node_that_has_room_for_them_or_nothing_begins() -> None:
    shape = Shape(role="worker", size=3, cpus_per_member=2.0, spares=1)
    assert node_for_all(nodes(2, 8, 16), shape) == "10.0.0.1"
    assert node_for_all(nodes(2), shape) == ""
    with pytest.raises(ClusterError, match="No node of the cluster has room for 4 worker"):
        node_for_all(nodes(7, 7), shape)


def test_members_of_a_gang_that_is_pinned_are_on_that_node(cluster: Cluster) -> None:
    from orchestray.platform.actors.gang import Gang

    address = cluster.nodes()[0]["NodeManagerAddress"]
    gang = Gang(cluster, Shape(role="worker", size=1, cpus_per_member=0.0, node=address))
    try:
        assert gang.nodes() == [address]
    finally:
        gang.close()
