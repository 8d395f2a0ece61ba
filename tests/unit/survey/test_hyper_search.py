"""Group G: searches of hyper-parameters, each by what the survey says of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from orchestray.search.methods.base import Proposal
from orchestray.search.methods.hyper.bayesian import Bayesian
from orchestray.search.methods.hyper.boolean_polynomials import sparse_terms
from orchestray.search.methods.hyper.learning_curve import LearningCurve
from orchestray.search.methods.hyper.particle_swarm import ParticleSwarm
from orchestray.search.methods.hyper.random import Random
from orchestray.search.simulation.virtual_time import simulate
from orchestray.search.spaces.dimensions import Choice, Dimension, Integer, Uniform
from support.functions import BRANIN_BEST, BRANIN_SPACE, HARTMANN_BEST, HARTMANN_SPACE, branin, hartmann
from support.learning_curves import draw_curves, trained_curves
from support.replayed import replay
from support.training import digits, train

# -- Bayesian optimisation ---------------------------------------------------------------------------------------------


def regrets(model: str | None, seeds: range, trials: int) -> list[float]:
    """Return how far from Branin's best each search ends; a model of None searches at random."""
    found = []
    for seed in seeds:
        arguments: dict[str, Any] = {"space": BRANIN_SPACE, "seed": seed, "trials": trials}
        method = Random(**arguments) if model is None else Bayesian(model=model, **arguments)  # type: ignore[arg-type]
        score = simulate(method, branin).best.score
        assert score is not None
        found.append(BRANIN_BEST - score)
    return found


def test_bayesian_optimization_regret_on_branin_is_below_random_and_a_hundredth() -> None:
    random = float(np.median(regrets(None, range(10), 40)))
    assert float(np.median(regrets("gaussian_process", range(10), 25))) <= 0.01 < random, "of fewer trials"
    assert float(np.median(regrets("tpe", range(10), 40))) < random / 2


def test_bayesian_optimization_of_six_numbers_beats_random_search_of_ten_times_the_trials() -> None:
    def best(method: Any) -> float:
        score = simulate(method, hartmann).best.score
        assert score is not None
        return HARTMANN_BEST - score

    ours = [best(Bayesian(space=HARTMANN_SPACE, trials=50, seed=seed)) for seed in range(3)]
    random = [best(Random(space=HARTMANN_SPACE, trials=500, seed=seed)) for seed in range(3)]
    assert np.median(ours) < np.median(random)


# -- sequential model-based optimisation -------------------------------------------------------------------------------


def test_smbo_finds_the_planted_best_of_a_finite_set_with_no_more_trials_at_once_than_are_left() -> None:
    space: dict[str, Dimension] = {"filters": Integer(1, 8), "kernel": Choice((1, 3, 5, 7)), "kind": Choice(("a", "b"))}

    def score(proposal: Proposal, _step: int) -> float:
        values = proposal.changes
        return -abs(values["filters"] - 6) - abs(values["kernel"] - 5) / 2 - (values["kind"] == "a")

    running, most = 0, 0
    searched = simulate(Bayesian(space=space), score, workers=100)
    for call in searched.calls:
        running += (call.name == "ask" and call.answer is not None) - (call.name == "tell")
        most = max(most, running)
    assert most == 64, "the set of candidates"
    assert searched.best.proposal.changes == {"filters": 6, "kernel": 5, "kind": "b"}
    needed = []
    for seed in range(5):
        scores = simulate(Bayesian(space=space, seed=seed, trials=32), score).best_so_far()
        needed.append(scores.index(0.0) + 1 if 0.0 in scores else 64)
    assert np.median(needed) <= 24, "a walk through all 64 needs 32 in the mean"


# -- learning curves ---------------------------------------------------------------------------------------------------


def of_trainings(seed: int) -> np.ndarray:
    """Return the curves of 20 of 80 real trainings."""
    return trained_curves()[np.random.default_rng(seed).choice(80, 20, replace=False)]


@pytest.mark.parametrize("curves_of", [lambda seed: draw_curves(seed, 20, 100), of_trainings], ids=["drawn", "trained"])
def test_learning_curve_prediction_keeps_the_best_in_90_percent_of_50_searches_with_60_percent_of_the_epochs(
    curves_of: Callable[[int], np.ndarray],
) -> None:
    kept, used = 0, []
    for seed in range(50):
        curves = curves_of(seed)
        method = LearningCurve(space={"x": Uniform(0.0, 1.0)}, trials=20, steps_per_trial=100, every_steps=8, seed=seed)
        searched = simulate(
            method, lambda proposal, step, curves=curves: float(curves[proposal.trial, step - 1]), workers=2
        )
        best = np.flatnonzero(curves[:, -1] == curves[:, -1].max())
        kept += any(searched.trials[trial].status == "succeeded" for trial in best.tolist())
        used.append(searched.steps / 2000)
    assert kept >= 45
    assert np.mean(used) <= 0.6


# -- compressed sensing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_compressed_sensing_recovers_a_planted_sparse_boolean_function_from_few_samples(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_bits, num_samples = 30, 150
    planted = {(1, 7, 20): 3.0, (4, 9): -2.0, (29,): 1.5}
    signs = rng.choice([-1, 1], (num_samples, num_bits))
    scores = sum(c * signs[:, list(bits)].prod(1) for bits, c in planted.items()) + rng.normal(0, 0.1, num_samples)
    found = {term.bits: term.coefficient for term in sparse_terms(signs, np.asarray(scores), 3, 4)}
    assert num_samples < 2**num_bits / 1e6
    assert {bits: found.get(bits, 0.0) for bits in planted} == pytest.approx(planted, abs=0.1)
    assert all(abs(coefficient) < 0.1 for bits, coefficient in found.items() if bits not in planted)


# -- particle swarms ---------------------------------------------------------------------------------------------------


def rastrigin(proposal: Proposal, _step: int) -> float:
    return -sum(x**2 - 10 * math.cos(2 * math.pi * x) + 10 for x in proposal.changes.values())


def sphere(proposal: Proposal, _step: int) -> float:
    return -sum(x**2 for x in proposal.changes.values())


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize(("function", "num_dimensions"), [(sphere, 4), (rastrigin, 2)])
def test_particle_swarm_finds_the_minimum_of_sphere_and_rastrigin_with_and_without_a_barrier(
    function: Any, num_dimensions: int, synchronous: bool
) -> None:
    space = {f"x{axis}": Uniform(-5.12, 4.12) for axis in range(num_dimensions)}
    found = []
    for seed in range(3):
        method = ParticleSwarm(space=space, population=20, trials=1500, seed=seed, synchronous=synchronous)
        found.append(simulate(method, function, workers=8, seconds_per_step=lambda p: 1 + p.trial % 3).best.score)
    assert np.median(np.array(found)) > -1e-2


# -- real trainings ----------------------------------------------------------------------------------------------------

TRAINING_SPACE: dict[str, Dimension] = {"lr": Uniform(1e-4, 10.0, is_log=True), "momentum": Uniform(0.0, 0.99)}


def train_digits(proposal: Proposal, _step: int) -> float:
    """Return minus the loss at the end of a short training."""
    optimizer = {"type": "sgd", **proposal.changes}
    [trained] = train(digits(hidden=[16]), steps=30, optimizer=optimizer)
    loss = float(np.mean([step["loss"] for step in trained.steps[-5:]]))
    return -loss if math.isfinite(loss) else -1e6


def test_hyper_parameter_search_logs_every_trial_and_its_best_retrained_scores_the_same() -> None:
    searched = simulate(Bayesian(space=TRAINING_SPACE, trials=10, initial=6, seed=1), train_digits)
    assert sorted(searched.trials) == list(range(10))
    assert all(trial.status == "succeeded" and trial.score is not None for trial in searched.trials.values())
    assert searched.best.score == max(trial.score or -math.inf for trial in searched.trials.values())
    assert train_digits(searched.best.proposal, 1) == searched.best.score


def test_particle_swarm_of_trainings_ends_no_worse_than_random_search_and_its_state_is_restored() -> None:
    make = lambda: ParticleSwarm(space=TRAINING_SPACE, population=6, trials=24)  # noqa: E731
    swarm = simulate(make(), train_digits, workers=6)
    random = simulate(Random(space=TRAINING_SPACE, trials=24), train_digits)
    assert swarm.best.score is not None
    assert random.best.score is not None
    assert swarm.best.score >= random.best.score
    resumed, half = make(), len(swarm.calls) // 2
    replay(resumed, swarm.calls[:half])
    replay(resumed, swarm.calls[half:])
