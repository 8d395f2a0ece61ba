"""The survey's population methods in processes of Ray: what they find there is what they find in virtual time."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from orchestray.platform.actors.pool import make_room
from orchestray.search.config.load import load_search_config
from orchestray.search.engine.run import run_search
from orchestray.search.methods.base import Proposal
from orchestray.search.registry.check import method_of
from orchestray.search.results.schema import TrialChange
from orchestray.search.results.writer import SearchRecords
from orchestray.search.simulation.virtual_time import Simulated, simulate
from support.formula_task import FormulaTask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestray.platform.cluster.cluster import Cluster

BITS = [f"task.bit{bit}" for bit in range(8)]
PLANE = {f"task.{axis}": {"type": "uniform", "low": -5.12, "high": 5.12} for axis in "xy"}


@pytest.fixture(scope="module", autouse=True)
def _give_back(cluster: Cluster) -> Iterator[None]:
    make_room(cluster)
    yield
    make_room(cluster)


def config(method: dict[str, Any], metric: str, space: dict[str, Any], trials: int, meeting: str = "") -> Any:
    numbers = {key.removeprefix("task."): 0 for key in space}
    task = {"type": "support.formula_task:FormulaTask", "meeting": meeting, **numbers}
    return load_search_config(
        {
            "name": "formula",
            "base": {"task": task, "train": {"batch_size": 2, "steps": 1, "optimizer": {"type": "sgd", "lr": 0.1}}},
            "search": {
                "method": method,
                "objective": {"metric": metric, "mode": "max"},
                "space": space,
                "budget": {"trials": trials, "steps_per_trial": 1},
                "parallel": 2,
            },
        }
    )


def formula(metric: str) -> Any:
    """Return a function for what `FormulaTask` reports, for a search in virtual time."""

    def evaluate(proposal: Proposal, _step: int) -> float:
        task = FormulaTask(**{key.removeprefix("task."): value for key, value in proposal.changes.items()})
        return float(task.metrics(torch.empty(0), {})[metric])

    return evaluate


def told(simulated: Simulated) -> dict[int, tuple[dict[str, Any], float | None]]:
    return {trial: (dict(one.proposal.changes), one.score) for trial, one in simulated.trials.items()}


def test_a_genetic_algorithm_evaluated_by_ray_reaches_one_max_as_its_seed_says(
    cluster: Cluster, tmp_path: Path
) -> None:
    space = {bit: {"type": "binary"} for bit in BITS}
    (meeting := tmp_path / "meeting").mkdir()
    wanted = config({"type": "genetic_cnn", "population": 10}, "ones", space, 60, str(meeting))
    processes = set()

    def see(change: TrialChange) -> None:
        if "process" in change.metrics:
            processes.add(int(change.metrics["process"]))

    with SearchRecords.create(tmp_path, "genetic") as records:
        outcome = run_search(wanted, records, on_change=see)
        found = {trial: (line["config"], line["objective"]) for trial, line in records.lines.items()}
    assert len(processes - {os.getpid()}) > 1, "individuals of a generation are evaluated beside each other"

    method = method_of(wanted)
    expected = simulate(method, formula("ones"), workers=7)
    assert found == told(expected)
    assert expected.best.score == len(BITS)
    assert outcome.more == {"tally": method.tally()}
    assert method.tally()["generation"] > 1


def test_a_particle_swarm_searched_on_tune_beats_random_search_and_goes_on_where_it_was_stopped(
    cluster: Cluster, tmp_path: Path
) -> None:
    swarm = {"type": "particle_swarm", "population": 8, "synchronous": True}
    wanted = config(swarm, "sphere", PLANE, 32)
    stop, ended = threading.Event(), set()

    def see(change: TrialChange) -> None:
        if change.status == "succeeded":
            ended.add(change.trial)
        if len(ended) == 18:
            stop.set()

    with SearchRecords.create(tmp_path, "swarm") as records:
        assert run_search(wanted, records, stop=stop, on_change=see).status == "interrupted"
    with SearchRecords.open_existing(tmp_path, "swarm") as records:
        assert 18 <= len(records.lines) < 32
        assert run_search(wanted, records, resume=True).status == "succeeded"
        found = {trial: (line["config"], line["objective"]) for trial, line in records.lines.items()}
    whole = simulate(method_of(wanted), formula("sphere"), workers=8)
    assert found == told(whole), "positions, velocities and bests were restored"
    random = simulate(method_of(config({"type": "random"}, "sphere", PLANE, 32)), formula("sphere"))
    assert len(random.trials) == len(found)
    assert max(score for _, score in found.values()) >= (random.best.score or 0.0)
