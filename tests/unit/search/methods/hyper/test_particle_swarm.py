"""Particle swarms: as an optimiser, asynchronous or not, and after a resume."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Proposal
from orchestray.search.methods.hyper.particle_swarm import ParticleSwarm
from orchestray.search.simulation.virtual_time import Simulated, simulate
from orchestray.search.spaces.dimensions import Choice, Dimension, Integer, Uniform
from support.replayed import replay

PLANE: dict[str, Dimension] = {"x": Uniform(-5.12, 5.12), "y": Uniform(-5.12, 5.12)}


def sphere(proposal: Proposal, _step: int) -> float:
    return -sum((value - 1.0) ** 2 for value in proposal.changes.values())


def swim(workers: int, **arguments: Any) -> Simulated:
    return simulate(
        ParticleSwarm(**{"space": PLANE, "trials": 600} | arguments),
        sphere,
        workers=workers,
        seconds_per_step=lambda proposal: 1.0 + proposal.trial % 3,
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_asynchronous_swarm_ends_where_the_synchronous_does(seed: int) -> None:
    together = swim(8, seed=seed, synchronous=True).best.score
    alone = swim(8, seed=seed).best.score
    assert together is not None
    assert alone is not None
    assert -1e-4 < together <= 0
    assert -1e-4 < alone <= 0


def test_the_synchronous_swarm_proposes_the_same_at_any_concurrency() -> None:
    one, eight = (swim(workers, synchronous=True, trials=100) for workers in (1, 8))
    assert [t.proposal for t in one.trials.values()] == [t.proposal for t in eight.trials.values()]


@pytest.mark.parametrize("seed", range(4))
def test_of_several_best_a_synchronous_swarm_follows_the_same_whoever_came_first(seed: int) -> None:
    def coarse(proposal: Proposal, step: int) -> float:
        return round(sphere(proposal, step) / 10)

    def proposals(workers: int) -> list[Proposal]:
        swarm = ParticleSwarm(space=PLANE, trials=64, population=8, synchronous=True, seed=seed)
        found = simulate(swarm, coarse, workers=workers, seconds_per_step=lambda proposal: 9.0 - proposal.trial % 8)
        return [trial.proposal for trial in found.trials.values()]

    assert proposals(1) == proposals(8)


def test_only_as_many_trials_run_as_there_are_particles() -> None:
    method = ParticleSwarm(space=PLANE, trials=100, population=5)
    assert [method.ask() is None for _ in range(6)] == [False] * 5 + [True]
    assert not method.is_done


def test_particles_stay_in_the_cube_and_move_over_integers_and_choices() -> None:
    space: dict[str, Dimension] = {"n": Integer(1, 9), "kind": Choice(("a", "b"))}
    searched = simulate(
        ParticleSwarm(space=space, trials=200, population=6),
        lambda proposal, _step: -abs(proposal.changes["n"] - 9) + (proposal.changes["kind"] == "b"),
        workers=3,
    )
    assert searched.best.proposal.changes == {"n": 9, "kind": "b"}


def test_a_failed_trial_is_nobodys_best_and_the_swarm_flies_on() -> None:
    def evaluate(proposal: Proposal, step: int) -> float:
        if proposal.changes["x"] > 0:
            raise RuntimeError("diverged")
        return sphere(proposal, step)

    searched = simulate(ParticleSwarm(space=PLANE, trials=400), evaluate, workers=4)
    assert searched.best.score == pytest.approx(-1.0, abs=0.05), "the best that does not fail is at x = 0"


def test_a_killed_swarm_flies_on_as_if_it_had_not_been() -> None:
    calls = swim(4, trials=120).calls
    resumed = ParticleSwarm(space=PLANE, trials=120)
    replay(resumed, calls)
    whole = ParticleSwarm(space=PLANE, trials=120)
    replay(whole, calls)
    assert np.array_equal(resumed.best, whole.best)


def test_architectures_and_a_swarm_of_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="architectures"):
        ParticleSwarm(space=PLANE, architecture=object())
    with pytest.raises(ConfigError, match="population"):
        ParticleSwarm(space=PLANE, population=1)


@pytest.mark.parametrize("synchronous", [False, True])
def test_no_point_of_whole_numbers_and_choices_comes_twice_and_the_swarm_ends_with_the_last(
    *, synchronous: bool
) -> None:
    space: dict[str, Dimension] = {"n": Integer(1, 6), "kind": Choice(("a", "b", "c"))}
    method = ParticleSwarm(space=space, trials=40, population=4, synchronous=synchronous)
    searched = simulate(method, lambda proposal, _step: float(proposal.changes["n"]), workers=2)
    points = [tuple(trial.proposal.changes.values()) for trial in searched.trials.values()]
    assert len(points) == len(set(points)) == 18
