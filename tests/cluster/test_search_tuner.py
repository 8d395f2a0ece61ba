"""The methods in a user's own `tune.Tuner`: a function with a searcher, a class with checkpoints and a scheduler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orchestray.platform.actors.pool import make_room
from orchestray.search import tune_scheduler, tune_searcher
from orchestray.search.engine import tune_faults
from orchestray.search.methods.base import Continue, Decision, Exploit, Finished, Method, Pause, Proposal, Report
from orchestray.search.spaces.dimensions import make_dimension
from orchestray.search.tune.searcher import MethodSearcher
from support.bit_space import BitSpace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from orchestray.platform.cluster.cluster import Cluster

SPACE = {"x": make_dimension("choice", values=[0.0, 1.0, 2.0])}


@pytest.fixture(scope="module", autouse=True)
def _give_back(cluster: Cluster) -> Iterator[None]:
    make_room(cluster)
    tune_faults.mend()  # Tune as it is would at times leave the tests that come later without a CPU
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
        tune_config=tune.TuneConfig(search_alg=searcher, num_samples=-1, max_concurrent_trials=2, reuse_actors=True),
        run_config=_quiet(tmp_path),
    )
    results = tuner.fit()
    assert sorted(result.config["x"] for result in results) == [0.0, 1.0, 2.0]
    assert results.get_best_result("score", "max").config["x"] == 1.0
    standings = searcher.session.trials.values()
    assert [standing.ended.status for standing in standings if standing.ended] == ["succeeded"] * 3


def test_population_based_training_moves_a_users_class_by_its_checkpoints(cluster: Cluster, tmp_path: Path) -> None:
    from ray import tune

    class Climber(tune.Trainable):
        """A trainable that climbs by its rate each step: a copy of the leader has been where the leader was."""

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
            num_samples=-1,
            max_concurrent_trials=4,
            reuse_actors=True,
        ),
        run_config=_quiet(tmp_path),
    )
    results = tuner.fit()
    assert not results.errors
    assert any(standing.taken for standing in searcher.session.trials.values())
    assert [result.metrics["training_iteration"] for result in results if result.metrics] == [12] * 4
    best = max(result.metrics["score"] for result in results)
    alone = max(standing.proposal.changes["x"] for standing in searcher.session.trials.values()) * 12
    assert best > 0.9 * alone


def _keeper() -> Any:
    """Return a class whose checkpoint is a file with the names of all that it was, step by step."""
    from ray import tune

    class Keeper(tune.Trainable):
        def setup(self, config: dict[str, Any]) -> None:
            self.path: list[str] = []
            if "inherits" in config:
                self.path = json.loads((Path(config["inherits"]) / "path.json").read_text())

        def reset_config(self, new_config: dict[str, Any]) -> bool:
            self.setup(new_config)
            return True

        def step(self) -> dict[str, Any]:
            self.path.append(str(self.config.get("x", self.trial_id)))
            return {"score": len(self.path) + float(self.config.get("x", 0.0)), "path": " ".join(self.path)}

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            (Path(checkpoint_dir) / "path.json").write_text(json.dumps(self.path))

        def load_checkpoint(self, checkpoint: dict[str, Any] | str | None) -> None:
            assert isinstance(checkpoint, str)
            self.path = json.loads((Path(checkpoint) / "path.json").read_text())

    return Keeper


def _fit(searcher: Any, tmp_path: Path) -> Any:
    from ray import tune

    settings = tune.TuneConfig(
        search_alg=searcher, scheduler=tune_scheduler(searcher), num_samples=-1, reuse_actors=True
    )
    results = tune.Tuner(_keeper(), tune_config=settings, run_config=_quiet(tmp_path)).fit()
    assert not results.errors
    return results


def test_a_trial_that_becomes_another_with_its_report_has_the_others_steps_and_trains_on(
    cluster: Cluster, tmp_path: Path
) -> None:
    class SecondTakesFirst(Method):
        """A method of two trials: the first to report is held until the other has taken its state."""

        num_asked, first, due = 0, None, ()

        def ask(self) -> Proposal | None:
            self.num_asked += 1
            return Proposal(self.num_asked - 1, {"x": float(self.num_asked)})

        def next_report(self, trial: int, step: int) -> int:
            return step + 2

        def report(self, report: Report) -> Decision:
            if report.step != 2:
                return Continue()
            if self.first is None:
                self.first = report.trial
                return Pause()
            self.due = ((self.first, Continue()),)
            return Exploit(self.first, {"x": float(report.trial + 1)}, "copied")

        def released(self) -> Sequence[tuple[int, Decision]]:
            due, self.due = self.due, ()
            return due

        def tell(self, finished: Finished) -> None: ...

        @property
        def hands_on(self) -> bool:
            return True

        @property
        def is_done(self) -> bool:
            return self.num_asked == 2

    def make() -> Method:
        return SecondTakesFirst(space=SPACE, steps_per_trial=6)

    searcher = MethodSearcher(make, metric="score", time="training_iteration")
    results = _fit(searcher, tmp_path)
    paths = {result.config["x"]: result.metrics["path"].split() for result in results}
    first = searcher.session.method.first + 1.0
    assert paths[first] == [str(first)] * 6
    assert paths[3.0 - first] == [str(first)] * 2 + [str(3.0 - first)] * 4


def test_each_point_of_omnivores_grid_probes_from_where_the_leader_is(cluster: Cluster, tmp_path: Path) -> None:
    searcher = tune_searcher(
        "omnivore", SPACE, metric="score", trials=3, every_steps=3, probe_steps=1, steps_per_trial=6
    )
    results = _fit(searcher, tmp_path)
    paths = {result.config["x"]: result.metrics["path"] for result in results}
    assert paths[2.0] == "2.0 2.0 2.0 2.0 2.0 2.0"
    assert paths[0.0] == "2.0 2.0 2.0 0.0"
    assert paths[1.0] == "2.0 2.0 2.0 1.0"


def test_a_child_starts_from_its_parents_checkpoint_and_trains_as_long_as_any(cluster: Cluster, tmp_path: Path) -> None:
    searcher = tune_searcher(
        "large_scale_evolution",
        {},
        architecture=BitSpace(3),
        metric="score",
        trials=6,
        population=2,
        steps_per_trial=2,
        reset_probability=0.0,
    )
    results = _fit(searcher, tmp_path)
    numbers = searcher.numbers
    paths = {numbers[result.metrics["trial_id"]]: result.metrics["path"].split() for result in results}
    heirs = 0
    for number, standing in searcher.session.trials.items():
        proposal = standing.proposal
        heirs += proposal.inherits
        before = paths[proposal.parent] if proposal.inherits and proposal.parent is not None else []
        assert [numbers[one] for one in paths[number]] == [*(numbers[one] for one in before), number, number]
    assert heirs
