"""Random: independent of scores and order; Sobol fills the space evenly; no architecture twice."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.hyper.random import Random
from orchestray.search.simulation.virtual_time import simulate
from orchestray.search.spaces.dimensions import Choice, Uniform

SPACE = {"x": Uniform(0.0, 1.0), "y": Uniform(1e-4, 1.0, is_log=True), "kind": Choice(("a", "b"))}


class Dice:
    """A user's own space, as small as allowed."""

    def sample(self, rng: np.random.Generator) -> Any:
        return {"eyes": int(rng.integers(6))}

    mutate = crossover = build = None


@pytest.mark.parametrize("sequence", ["pseudo", "sobol"])
def test_proposals_and_the_best_are_the_same_at_any_concurrency(sequence: Literal["pseudo", "sobol"]) -> None:
    def search(workers: int) -> tuple[list[Any], Any]:
        method = Random(space=SPACE, sequence=sequence, trials=100, seed=3)
        found = simulate(
            method,
            lambda proposal, _step: -abs(proposal.changes["x"] - 0.3),
            workers=workers,
            seconds_per_step=lambda proposal: 1 + proposal.changes["x"],
        )
        return [trial.proposal for trial in found.trials.values()], found.best.proposal

    assert search(1) == search(8)
    assert Random(space=SPACE, sequence=sequence, seed=4).ask() != Random(space=SPACE, sequence=sequence, seed=3).ask()


def units_of(method: Random, count: int) -> np.ndarray:
    """Return the points of the unit cube at which `count` draws lie."""
    changes = [method.ask().changes for _ in range(count)]  # type: ignore[union-attr]
    return np.array([[dimension.to_unit(drawn[key]) for key, dimension in SPACE.items()] for drawn in changes])


def test_draws_fill_the_unit_cube_evenly() -> None:
    method = Random(space=SPACE, trials=2000)
    units = units_of(method, 2000)
    assert units.mean(0) == pytest.approx([0.5] * 3, abs=0.04)
    assert units[:, :2].var(0) == pytest.approx([1 / 12] * 2, abs=0.01)


def test_sobol_points_leave_no_sixteenth_of_each_axis_empty_over_all_their_blocks() -> None:
    method = Random(space=SPACE, sequence="sobol", trials=256, seed=5)
    units = units_of(method, 256)
    for axis in (0, 1):
        counts = np.histogram(units[:, axis], bins=16, range=(0, 1))[0]
        assert set(counts) == {16}


def test_no_architecture_comes_twice_and_the_search_ends_when_there_are_no_more() -> None:
    method = Random(space={}, architecture=Dice(), trials=100)  # type: ignore[arg-type]
    found = simulate(method, lambda _proposal, _step: 0.0)
    assert sorted(trial.proposal.genome["eyes"] for trial in found.trials.values()) == list(range(6))
    assert method.is_done


def test_nothing_to_search_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to search"):
        Random(space={})
