"""Evolution from a queue, in which nobody dies."""

from __future__ import annotations

import numpy as np
import pytest

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Proposal
from orchestray.search.methods.evolution.hierarchical import HierarchicalEvolution
from orchestray.search.simulation.virtual_time import simulate
from support.bit_space import BitSpace, num_ones


def one_max(proposal: Proposal, _step: int) -> float:
    return num_ones(proposal.genome)


def test_a_worker_that_asks_is_never_sent_away() -> None:
    durations = np.random.default_rng(0).exponential(size=300)
    method = HierarchicalEvolution(space={}, architecture=BitSpace(16), population=10, trials=200, initial_mutations=5)
    simulated = simulate(method, one_max, workers=15, seconds_per_step=lambda one: float(durations[one.trial]))
    free_at = [0.0] * 15
    for trial in simulated.trials:
        free_at.sort()
        free_at[0] += durations[trial]
    assert simulated.makespan_s == pytest.approx(max(free_at))
    assert len(method.population) == len(simulated.trials) == 200


def test_parents_are_better_than_the_population_they_are_drawn_from() -> None:
    method = HierarchicalEvolution(
        space={}, architecture=BitSpace(30), population=20, trials=400, tournament_fraction=0.1, initial_mutations=5
    )
    simulated = simulate(method, one_max)
    scores = {number: trial.score for number, trial in simulated.trials.items()}
    parents = [scores[t.proposal.parent] for t in simulated.trials.values() if t.proposal.parent is not None]
    assert len(parents) == 380
    assert np.mean([score or 0 for score in parents]) > np.mean([score or 0 for score in scores.values()]) + 1
    assert simulated.best.score is not None
    assert simulated.best.score >= 25


def test_no_genotype_is_evaluated_twice_and_a_known_space_ends() -> None:
    method = HierarchicalEvolution(space={}, architecture=BitSpace(5), population=4, trials=500, initial_mutations=3)
    simulated = simulate(method, one_max, workers=3)
    genomes = {tuple(trial.proposal.genome.values()) for trial in simulated.trials.values()}
    assert len(genomes) == len(simulated.trials) == 32
    assert method.is_done


def test_a_fraction_outside_of_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="tournament_fraction"):
        HierarchicalEvolution(space={}, architecture=BitSpace(5), tournament_fraction=0.0)
