"""DistBelief through Ray: replicas in stages under servers of each stage, and kills of a stage and of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import orchestray
from orchestray.platform.actors.pool import make_room
from orchestray.platform.run.checkpoint import load_model_tensors
from support.cli import read_lines
from support.slow_digits import slowly
from support.under_way import UnderWay, losses

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from orchestray.platform.cluster.cluster import Cluster

EPOCHS, STEPS_AN_EPOCH = 2, 45
CHECKPOINT_EVERY = 25
MICROBATCHES = {"pipeline": 2, "tensor": 1}
"""Micro-batches of a replica's share of a step: one for each of two stages."""


@pytest.fixture(scope="module", autouse=True)
def _give_back(cluster: Cluster) -> Iterator[None]:
    yield
    make_room(cluster)


def config(axis: str = "pipeline", epochs: int = EPOCHS, **exchange: Any) -> dict[str, Any]:
    chosen = {"type": "parameter_server", "consistency": "asynchronous", "shards": 2, **exchange}
    network = {"data": 2, axis: 2, "microbatches": MICROBATCHES[axis]}
    return {
        "name": "distbelief",
        "task": {"type": "digits", "hidden": [16]},
        "train": {"batch_size": 32, "epochs": epochs, "optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.9}},
        "strategy": {"network": network, "exchange": chosen},
        "checkpoint": {"every_steps": CHECKPOINT_EVERY},
    }


def begin(config: dict[str, Any], runs: Path, name: str, axis: str = "pipeline") -> tuple[UnderWay, Path]:
    """Begin a run that is slow once it has a checkpoint; return it, and the file to remove to end that."""
    slowed, slow = slowly(runs, CHECKPOINT_EVERY, parts=MICROBATCHES[axis], share=0.05)
    running = UnderWay(config, runs, slowed, name=name)
    running.until("a checkpoint", lambda: running.events("checkpoint_saved"))
    return running, slow


def steps_of(path: Path) -> list[int]:
    return [line["step"] for line in read_lines(path / "metrics.jsonl") if "split" not in line]


@pytest.mark.slow
def test_synchronous_replicas_in_stages_are_the_single_process_also_when_a_server_of_the_last_stage_is_killed(
    tmp_path: Path,
) -> None:
    alone = {key: value for key, value in config(epochs=1).items() if key != "strategy"}
    whole = orchestray.train(alone, runs_dir=tmp_path, name="whole")
    running, slow = begin(config(epochs=1, consistency="synchronous"), tmp_path, "server")
    running.kill(1, "parameter_server")
    slow.unlink()
    running.finish()
    assert steps_of(running.path) == steps_of(whole.path)
    found, wanted_losses = (dict(losses(path)) for path in (running.path, whole.path))
    assert found == pytest.approx(wanted_losses, abs=1e-4)
    wanted = load_model_tensors(str(whole.path / "model"))
    for name, tensor in load_model_tensors(str(running.path / "model")).items():
        assert tensor.sub(wanted[name]).abs().max() <= 1e-4, name
    assert [event["role"] for event in running.events("worker_lost")] == ["parameter_server"]


@pytest.mark.parametrize(("lost", "axis"), [(3, "pipeline"), (0, "pipeline"), (1, "tensor")])
def test_distbelief_learns_and_a_killed_stage_loses_nothing_while_the_other_replica_goes_on(
    tmp_path: Path, lost: int, axis: str
) -> None:
    running, slow = begin(config(axis), tmp_path, f"{axis}-{lost}", axis)
    before = running.actors()
    running.kill(lost)
    lost_at = running.until("the loss noticed", lambda: running.events("worker_lost"))[0]["time_s"]

    def returns() -> list[dict[str, Any]]:
        return [event for event in running.events("worker_started") if event["time_s"] > lost_at]

    running.until("the replacement", returns)
    slow.unlink()
    running.finish()

    assert [(event["role"], event["rank"]) for event in running.events("worker_lost")] == [("worker", lost)]
    result = running.result()
    assert result["restarts"] == 1
    assert steps_of(running.path) == list(range(1, EPOCHS * STEPS_AN_EPOCH + 1))  # each once: nothing was begun again
    assert result["final"]["validation"]["accuracy"] > 0.6  # of ten classes; which update comes first is not fixed
    assert sum(result["staleness"]["histogram"].values()) == 2 * EPOCHS * STEPS_AN_EPOCH  # each share counted once
    assert [(one["replica"], one["stage"]) for one in result["workers"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    back = returns()
    assert {event["rank"] for event in back} == {lost}  # the other stage of its replica kept its process, as all others
    assert before[lost] not in {event["pid"] for event in back}
    until_back = min((event["time_s"] for event in back), default=1e9)
    assert [line for line in read_lines(running.path / "metrics.jsonl") if lost_at < line["time_s"] < until_back]
