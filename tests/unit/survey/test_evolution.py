"""Evolution of architectures: the systems of the survey."""

from __future__ import annotations

import numpy as np
import pytest

from orchestray.search.config.load import load_search_config
from orchestray.search.methods.base import Proposal
from orchestray.search.methods.evolution.genetic_cnn import GeneticCnn
from orchestray.search.methods.evolution.large_scale import LargeScaleEvolution
from orchestray.search.simulation.occupancy import occupancy_of
from orchestray.search.simulation.virtual_time import Simulated, simulate
from orchestray.search.spaces.architectures.layer_graph import LayerGraph
from support.bit_space import BitSpace, num_ones
from support.layers import ROOT

STEADY_STATE = ROOT / "configs/search/digits-steady-state.yaml"


def one_max(proposal: Proposal, _step: int = 0) -> float:
    return num_ones(proposal.genome)


def check_nobody_waits(simulated: Simulated, durations: np.ndarray, workers: int) -> None:
    """Check that each trial but the first ones begins when another ends.

    Then no worker is ever free while there is something to do.
    """
    began = np.array([trial.began_s for trial in simulated.trials.values()])
    ended = np.array([trial.ended_s for trial in simulated.trials.values()])
    np.testing.assert_allclose(ended - began, durations[list(simulated.trials)])
    assert sorted(began) == [0.0] * workers + sorted(ended)[: len(ended) - workers]


@pytest.mark.parametrize("workers", [1, 7])
def test_genetic_algorithms_reach_one_max_with_the_same_result_for_the_same_seed(workers: int) -> None:
    def run(at_once: int) -> tuple[float | None, list[dict[str, int]]]:
        method = GeneticCnn(space={}, architecture=BitSpace(4, stages=4), population=20, trials=600, seed=1)
        durations = np.random.default_rng(at_once).exponential(size=1000)
        simulated = simulate(method, one_max, workers=at_once, seconds_per_step=lambda one: float(durations[one.trial]))
        return simulated.best.score, [trial.proposal.genome for trial in simulated.trials.values()]

    best, genomes = run(workers)
    assert best == 16.0
    assert (best, genomes) == run(3)


def test_a_generation_of_a_genetic_algorithm_is_evaluated_all_at_once() -> None:
    method = GeneticCnn(space={}, architecture=BitSpace(4, stages=4), population=20, trials=600, seed=1)
    simulated = simulate(method, one_max, workers=20)
    assert len(simulated.trials) == 600
    assert simulated.makespan_s <= method.generation + 1, "an evaluation takes 1 s, and so does a generation"


@pytest.mark.slow
def test_the_titan_run_keeps_18000_simulated_workers_busy() -> None:
    """Simulate the run in virtual time, as a user does with the config and `--simulate`: it cannot be repeated.

    No worker is idle before the last trial begins. After that they are, for as long as the longest trial at most
    (R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", 1969).
    """
    workers, trials, hour_s = 18_000, 27_000, 3600.0
    budget = [f"search.parallel={workers}", f"search.budget.trials={trials}", "search.budget.time_limit_s=null"]
    config = load_search_config(STEADY_STATE, [*budget, "search.architecture=null", "search.method.population=100"])
    found, simulated = occupancy_of(config, trial_s=hour_s)
    assert (found.workers, found.trials, found.ended) == (workers, trials, trials)
    crossed = [trial.proposal.change.startswith("crossover") for trial in simulated.trials.values()]
    assert np.mean(crossed[workers:]) == pytest.approx(0.5, abs=4 * 0.5 / np.sqrt(trials - workers))
    durations = np.array([(one.ended_s or 0.0) - one.began_s for one in simulated.trials.values()])
    check_nobody_waits(simulated, durations, workers)
    assert found.utilisation_until_last == pytest.approx(1.0)
    last_s = max(trial.began_s for trial in simulated.trials.values())
    # By then half of the workers have ended a trial, next to none of them two: that is after the median of a trial,
    # exp(-0.3^2 / 2) of its mean, whose sample has a relative standard error of sqrt(0.25 / workers) over the density
    # there, 1 / (0.3 sqrt(2 pi)).
    error = 4 * np.sqrt(0.25 / workers) * 0.3 * np.sqrt(2 * np.pi)
    assert last_s == pytest.approx(hour_s * np.exp(-(0.3**2) / 2), rel=error)
    assert last_s + durations.min() <= simulated.makespan_s <= last_s + durations.max()
    assert found.utilisation == pytest.approx(durations.sum() / (workers * simulated.makespan_s))
    assert 0.35 < found.utilisation < 0.45


def test_a_run_that_its_time_limit_ends_loses_no_time_of_a_worker_but_a_generation_does() -> None:
    """Simulate a day of trials of three hours."""
    workers, day = 200, ["search.budget.trials=3000", "search.budget.time_limit_s=86400", "search.parallel=200"]
    steady = load_search_config(STEADY_STATE, [*day, "search.method.population=100"])
    generations = load_search_config(
        ROOT / "configs/search/digits-genetic-cnn.yaml",
        [*day, "search.method.population=200", "search.architecture.nodes=[6, 6]"],
    )
    without, simulated = occupancy_of(steady, trial_s=3 * 3600)
    assert without.utilisation == pytest.approx(1.0)
    assert without.trials == without.ended + workers
    assert without.hours == 24
    assert without.trials_per_hour == pytest.approx(workers / 3, rel=0.1)
    assert max(trial.ended_s or 0.0 for trial in simulated.trials.values()) <= 86400
    with_them, _ = occupancy_of(generations, trial_s=3 * 3600)
    assert with_them.utilisation < 0.8


def test_large_scale_evolution_is_the_better_the_larger_the_population() -> None:
    """Use the paper's setting, a worker a few individuals: more of them evaluate more.

    The score has a trap: strides, without which no network does well, cost at first. It is the mean over 8 seeds. If
    tournaments are decided by coin tosses, as many evaluations come nowhere near. (Of as many evaluations in all, the
    smaller population is ahead here.)
    """

    def score(proposal: Proposal, _step: int = 0) -> float:
        layers = proposal.genome["layers"]
        strides = sum(layer["stride"] == 2 for layer in layers)
        return len(layers) + len(proposal.genome["skips"]) / 4 + {0: 0.0, 1: -1.0}.get(strides, 6.0)

    def best(population: int, seed: int, *, is_tossed: bool = False) -> float:
        method = LargeScaleEvolution(
            space={}, architecture=LayerGraph(), population=population, trials=12 * population, seed=seed
        )
        tosses = np.random.default_rng(seed)
        told = (lambda _proposal, _step: float(tosses.random())) if is_tossed else score
        return max(score(trial.proposal) for trial in simulate(method, told, workers=2).trials.values())

    means = [np.mean([best(population, seed) for seed in range(8)]) for population in (2, 6, 18)]
    assert means[0] < means[1] < means[2]
    assert means[2] > np.mean([best(18, seed, is_tossed=True) for seed in range(8)]) + 3
