"""The methods in a user's own `tune.Tuner`: a function with a searcher, a class with checkpoints and a scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orchestray.platform.gang.pool import make_room
from orchestray.search import tune_scheduler, tune_searcher
from orchestray.search.spaces.dimensions import make_dimension

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestray.platform.cluster.cluster import Cluster

SPACE = {"x": make_dimension("choice", values=[0.0, 1.0, 2.0])}


@pytest.fixture(scope="module", autouse=True)
def _give_back(cluster: Cluster) -> Iterator[None]:
    make_room(cluster)
    yield
    make_room(cluster)


def _quiet(tmp_path: Path) -> Any:
    from ray import tune

    return tune.RunConfig(storage_path=str(tmp_path), name="own", verbose=0)


def test_a_grid_runs_a_users_function_once_a_point(cluster: Cluster, tmp_path: Path) -> None:
    from ray import tune

    def function(config: dict[str, Any]) -> None:
        tune.report({"score": -((config["x"] - 1.0) ** 2)})

    searcher = tune_searcher("grid", SPACE, metric="score")
    tuner = tune.Tuner(
        function,
        tune_config=tune.TuneConfig(search_alg=searcher, num_samples=-1, max_concurrent_trials=2),
        run_config=_quiet(tmp_path),
    )
    results = tuner.fit()
    assert sorted(result.config["x"] for result in results) == [0.0, 1.0, 2.0]
    assert results.get_best_result("score", "max").config["x"] == 1.0
    standings = searcher.director.trials.values()
    assert [standing.ended.status for standing in standings if standing.ended] == ["succeeded"] * 3


def test_population_based_training_moves_a_users_class_by_its_checkpoints(cluster: Cluster, tmp_path: Path) -> None:
    from ray import tune

    class Climber(tune.Trainable):
        """Climbs by its rate each step: who copies the leader has been where it was."""

        def setup(self, config: dict[str, Any]) -> None:
            self.height, self.rate, self.path = 0.0, config["x"], [config["x"]]

        def reset_config(self, new_config: dict[str, Any]) -> bool:
            self.setup(new_config)
            return True

        def step(self) -> dict[str, Any]:
            self.height += self.rate
            return {"score": self.height, "path": len(self.path)}

        def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
            return {"height": self.height, "path": self.path}

        def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
            assert checkpoint is not None
            self.height, self.path = checkpoint["height"], [*checkpoint["path"], self.rate]

    searcher = tune_searcher(
        "population_based_training",
        {"x": make_dimension("uniform", low=0.0, high=1.0)},
        metric="score",
        trials=4,
        population=4,
        interval_steps=2,
        synchronous=True,
        steps_per_trial=12,
        seed=1,
    )
    tuner = tune.Tuner(
        Climber,
        tune_config=tune.TuneConfig(
            search_alg=searcher,
            scheduler=tune_scheduler(searcher),
            num_samples=4,
            max_concurrent_trials=4,
            reuse_actors=True,
        ),
        run_config=_quiet(tmp_path),
    )
    results = tuner.fit()
    assert not results.errors
    copied = [standing for standing in searcher.director.trials.values() if standing.taken is not None]
    assert copied
    best = max(result.metrics["score"] for result in results)
    alone = max(standing.proposal.changes["x"] for standing in searcher.director.trials.values()) * 12
    assert best > 0.9 * alone
