"""Regularised evolution: who dies, who waits, what is evaluated, and what noise does to it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Finished, Proposal
from orchestray.search.methods.evolution.regularized import RegularizedEvolution
from orchestray.search.methods.evolution.variation import Individual
from orchestray.search.simulation.virtual_time import Simulated, simulate
from orchestray.search.spaces.dimensions import Binary, Choice, Uniform
from support.bit_space import BitSpace, num_ones


def one_max(proposal: Proposal, _step: int) -> float:
    return num_ones(proposal.genome)


def method(**arguments: Any) -> RegularizedEvolution:
    given: dict[str, Any] = {"space": {}, "architecture": BitSpace(20), "population": 10, "sample_size": 3}
    return RegularizedEvolution(**{**given, **arguments})


def random_durations(seed: int) -> Mapping[int, float]:
    return {trial: float(value) for trial, value in enumerate(np.random.default_rng(seed).exponential(size=2000))}


class Watched(RegularizedEvolution):
    """An evolution that notes which individuals enter and which are left."""

    def enter(self, individual: Individual) -> None:
        before = [*self.population, individual]
        super().enter(individual)
        left = {id(one) for one in self.population}
        gone = [one for one in before if id(one) not in left]
        assert len(self.population) <= self.population_size
        assert gone == (before[:1] if len(before) > self.population_size else [])


def test_always_the_oldest_is_removed() -> None:
    durations = random_durations(1)
    watched = Watched(space={}, architecture=BitSpace(20), population=10, sample_size=3, trials=300, seed=2)
    simulate(watched, one_max, workers=7, seconds_per_step=lambda proposal: durations[proposal.trial])
    assert len(watched.population) == 10
    assert watched.num_entered >= 300
    assert watched.tally()["population"] == [one.trial for one in watched.population]
    assert watched.tally()["tournaments"] >= 290, "each but the first ten has a parent that has won one"


def test_a_crossed_child_has_each_choice_of_either_parent_but_for_the_one_that_mutates() -> None:
    result = simulate(method(trials=200, crossover_probability=0.7, architecture=BitSpace(40)), one_max, workers=3)
    genomes = {number: trial.proposal.genome for number, trial in result.trials.items()}
    num_crossed = num_mixed = 0
    for trial in result.trials.values():
        proposal = trial.proposal
        if not proposal.change.startswith("crossover with trial "):
            continue
        assert proposal.parent is not None
        one, other = genomes[proposal.parent], genomes[int(proposal.change.split()[3].rstrip(","))]
        strange = [name for name, bit in proposal.genome.items() if bit not in (one[name], other[name])]
        assert len(strange) <= proposal.change.count(",")
        num_crossed += 1
        num_mixed += one != other and any(proposal.genome[name] == other[name] != one[name] for name in one)
    assert num_crossed == pytest.approx(0.7 * 190, abs=4 * np.sqrt(0.7 * 0.3 * 190))
    assert num_mixed > num_crossed / 2


def test_workers_never_wait_for_each_other() -> None:
    """Keep every worker busy, in virtual time with random durations, from the start until the budget is spent."""
    durations, workers = random_durations(3), 8
    searched = method(trials=400, seed=1)
    simulated = simulate(
        searched, one_max, workers=workers, seconds_per_step=lambda proposal: durations[proposal.trial]
    )
    free_at = [0.0] * workers  # list scheduling: each trial starts when the first worker is free
    for trial in simulated.trials:
        free_at.sort()
        free_at[0] += durations[trial]
    assert simulated.makespan_s == pytest.approx(max(free_at))
    assert len(simulated.trials) == 400


def test_no_genome_is_evaluated_twice() -> None:
    searched = method(architecture=BitSpace(8), trials=200)
    simulated = simulate(searched, one_max, workers=5)
    genomes = [tuple(trial.proposal.genome.values()) for trial in simulated.trials.values()]
    assert len(set(genomes)) == len(genomes) == 200


def test_a_space_that_is_known_to_its_end_ends_the_search() -> None:
    searched = method(architecture=BitSpace(4), trials=1000, population=4)
    simulated = simulate(searched, one_max, workers=3)
    assert searched.is_done
    assert len(simulated.trials) == 16


def test_it_climbs_where_random_draws_do_not() -> None:
    """Search OneMax of 20 bits: the best of 500 random strings has 16 or 17 ones, 18 in one of ten searches."""
    found = [simulate(method(trials=500, population=20, seed=seed), one_max, workers=4).best.score for seed in range(5)]
    assert min(found) >= 19.0


def test_the_same_calls_give_the_same_proposals() -> None:
    durations = random_durations(5)

    def run() -> list[Proposal]:
        simulated = simulate(method(trials=120, seed=4), one_max,
                             workers=6, seconds_per_step=lambda proposal: durations[proposal.trial])  # fmt: skip
        return [trial.proposal for trial in simulated.trials.values()]

    assert run() == run()


@pytest.mark.slow
def test_aging_beats_killing_the_worst_where_scores_are_noisy() -> None:
    """Check Real et al., 2019, section 6.2 and supplement A: a lucky score keeps no individual alive.

    The measure is the true score of the population at the end, over 20 seeds, in the paper's own simple space. There
    the score is the number of bits that are right.
    """
    space = {f"bit{bit}": Binary() for bit in range(30)}

    def true_score(aging: bool, seed: int) -> float:
        noise = np.random.default_rng(1000 + seed).normal(scale=5.0, size=800)
        searched = RegularizedEvolution(
            space=space, trials=800, population=80, sample_size=25, aging=aging, reuse_scores=False, seed=seed
        )
        simulate(searched, lambda proposal, _step: num_ones(proposal.changes) + float(noise[proposal.trial]))
        return float(np.mean([num_ones(individual.candidate.changes) for individual in searched.population]))

    differences = [true_score(True, seed) - true_score(False, seed) for seed in range(20)]
    assert np.mean(differences) > 4 * np.std(differences, ddof=1) / np.sqrt(20)


def test_failed_trials_never_become_parents() -> None:
    def evaluate(proposal: Proposal, _step: int) -> float:
        if proposal.genome["stage0.bit0"]:
            raise MemoryError
        return num_ones(proposal.genome)

    simulated = simulate(method(trials=150), evaluate, workers=3)
    failed = {number for number, trial in simulated.trials.items() if trial.status == "failed"}
    assert failed
    assert not failed & {trial.proposal.parent for trial in simulated.trials.values()}


def test_hyper_parameters_evolve_beside_the_architecture() -> None:
    space = {"train.optimizer.lr": Uniform(1e-3, 1.0, is_log=True), "train.batch_size": Choice((16, 32, 64))}
    searched = method(space=space, architecture=BitSpace(6), trials=300, seed=1)

    def evaluate(proposal: Proposal, _step: int) -> float:
        return num_ones(proposal.genome) - abs(np.log(proposal.changes["train.optimizer.lr"] / 0.1))

    simulated = simulate(searched, evaluate, workers=4)
    best = simulated.best.proposal
    assert num_ones(best.genome) == 6
    assert 0.05 < best.changes["train.optimizer.lr"] < 0.2


def test_a_proposal_after_2500_trials_takes_hardly_more_than_after_200_and_only_the_history_grows() -> None:
    searched = method(architecture=BitSpace(24), trials=3000, population=100, sample_size=10)
    rng = np.random.default_rng(0)
    calls: list[int] = []
    for number in range(2500):
        if number in (200, 2400):
            calls.append(0)
            sys.setprofile(lambda *_: calls.__setitem__(-1, calls[-1] + 1))
        proposal = searched.ask()
        assert proposal is not None
        searched.tell(Finished(proposal.trial, "succeeded", 1, float(rng.random())))
        if number in (300, 2499):
            sys.setprofile(None)
    assert len(searched.population) == 100
    assert not searched.running
    assert not searched.running_keys
    # Python's steps in a hundred proposals: more are known already, but nothing is asked of each trial there was.
    assert calls[1] < 2 * calls[0]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"population": 10, "trials": 5}, "larger than the budget"),
        ({"sample_size": 0}, "sample_size 0"),
        ({"architecture": None}, "nothing to evolve"),
        ({"population": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        method(**arguments)


def test_a_simulated_search_names_its_best() -> None:
    simulated: Simulated = simulate(method(trials=30), one_max)
    assert simulated.best.score == max(simulated.best_so_far())
