"""The three budgets of a trial in a search on Ray Tune: a number of steps, a goal, and a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from orchestray.platform.actors.pool import make_room
from orchestray.search.config.load import load_search_config
from orchestray.search.config.trial import trial_config
from orchestray.search.engine.run import run_search
from orchestray.search.results.writer import SearchRecords
from orchestray.search.trials.training import TrainingTrial

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from orchestray.platform.cluster.cluster import Cluster

STEPS, EVERY = 800, 10
"""Steps of a trial that nothing else ends, which take longer than the limit; and steps between validations."""
LIMIT_S = 0.15
GOAL_LOSS = 0.3
GOAL = {"metric": "loss", "value": GOAL_LOSS, "mode": "min"}
POINTS: dict[str, dict[str, Any]] = {
    "steps": {"train.until": None, "train.time_limit_s": None},
    "goal": {"train.until": GOAL, "train.time_limit_s": None},
    "time": {"train.until": None, "train.time_limit_s": LIMIT_S},
}


@pytest.fixture(scope="module", autouse=True)
def _give_back(cluster: Cluster) -> Iterator[None]:
    make_room(cluster)
    yield
    make_room(cluster)


def config(folder: Path) -> Any:
    task = {"type": "support.clocked_task:ClockedTask", "folder": str(folder), "name": "base"}
    train = {"batch_size": 8, "steps": STEPS, "validate_every_steps": EVERY, "optimizer": {"type": "sgd", "lr": 0.1}}
    space = {"task.name": list(POINTS), "train.until": [None, GOAL], "train.time_limit_s": [None, LIMIT_S]}
    return load_search_config(
        {
            "name": "budgets",
            "base": {"task": task, "train": train},
            "search": {
                "method": {"type": "random"},
                "objective": {"metric": "accuracy"},
                "space": {key: {"type": "choice", "values": values} for key, values in space.items()},
                "start": [{"task.name": name, **point} for name, point in POINTS.items()],
                "budget": {"trials": len(POINTS), "steps_per_trial": STEPS},
                "parallel": 2,
            },
        }
    )


def test_a_trial_ends_at_its_steps_at_the_validation_with_its_goal_and_after_the_first_step_beyond_its_time(
    cluster: Cluster, tmp_path: Path
) -> None:
    wanted = config(tmp_path)
    with SearchRecords.create(tmp_path, "budgets") as records:
        assert run_search(wanted, records).status == "succeeded"
        lines = {line["config"]["task.name"]: line for line in records.lines.values()}
    assert {name: line["status"] for name, line in lines.items()} == dict.fromkeys(POINTS, "succeeded")
    began_s, *losses_s = [float(line) for line in (tmp_path / "time").read_text().splitlines()]

    assert lines["steps"]["steps"] == STEPS

    alone = TrainingTrial(trial_config(wanted, {"task.name": "alone"}))
    reached = [each["loss"] <= GOAL_LOSS for each in alone.advance(lines["goal"]["steps"]).evaluations]
    assert reached == [False] * (len(reached) - 1) + [True]
    assert lines["goal"]["steps"] == EVERY * len(reached) > EVERY

    # All steps but the last are over within the limit, and the last is not.
    assert lines["time"]["steps"] == len(losses_s) < STEPS
    assert all(loss_s - began_s <= LIMIT_S for loss_s in losses_s[:-1])
    assert lines["time"]["seconds"] > LIMIT_S
