"""The genetic algorithm of Genetic CNN."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import numpy as np
import pytest

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Finished
from orchestray.search.methods.evolution.genetic_cnn import GeneticCnn, genes_of
from orchestray.search.methods.evolution.variation import Candidate
from orchestray.search.simulation.virtual_time import simulate
from orchestray.search.spaces.architectures.cell import Cell
from orchestray.search.spaces.architectures.genetic import Genetic
from orchestray.search.spaces.dimensions import Binary, Uniform
from support.bit_space import BitSpace, num_ones


def method(**arguments: Any) -> GeneticCnn:
    given: dict[str, Any] = {"space": {}, "architecture": BitSpace(6, stages=4), "population": 20, "trials": 400}
    return GeneticCnn(**{**given, **arguments})


def test_genes_and_genomes_are_one_to_one_for_all_strings() -> None:
    space = Genetic(nodes=(3, 3), channels=(4, 8))
    genes = genes_of({"task.batch_norm": Binary()}, space)
    seen = set()
    for bits in product((0, 1), repeat=7):
        candidate = genes.candidate(np.array(bits))
        assert tuple(genes.bits(candidate)) == bits
        seen.add(json.dumps([candidate.genome, candidate.changes]))
    assert len(seen) == 2**7


def test_stages_are_the_stages_of_the_space() -> None:
    genes = genes_of({"a.flag": Binary(), "b.flag": Binary()}, Genetic(nodes=(3, 4), channels=(4, 8)))
    assert genes.stages == (slice(0, 3), slice(3, 9), slice(9, 11))


def test_crossover_exchanges_whole_stages() -> None:
    searched = method(crossover_probability=1.0, stage_swap_probability=0.5, trials=100)
    before = [member.bits for member in searched.members]
    for _ in range(20):
        proposal = searched.ask()
        assert proposal is not None
        searched.tell(Finished(proposal.trial, "succeeded", 1, 1.0))
    assert searched.ask() is not None
    assert searched.generation == 1
    stages = [{tuple(bits[stage]) for bits in before} for stage in searched.genes.stages]
    for member in searched.members:
        assert all(tuple(member.bits[stage]) in old for stage, old in zip(searched.genes.stages, stages, strict=True))
    assert {tuple(member.bits) for member in searched.members} - {tuple(bits) for bits in before}


def test_mutation_flips_as_many_bits_as_it_says() -> None:
    searched = method(mutation_probability=1.0, bit_flip_probability=0.05)
    rng = np.random.default_rng(0)
    parent = searched.members[0]
    searched.trial_of[parent.key] = 0
    flips = sum(int((searched._mutated(parent, rng).bits != parent.bits).sum()) for _ in range(2000))
    expected, deviation = 2000 * 24 * 0.05, np.sqrt(2000 * 24 * 0.05 * 0.95)
    assert abs(flips - expected) < 4.5 * deviation


def test_a_string_is_evaluated_once_and_mean_and_best_of_generations_rise() -> None:
    searched = method()
    generations: dict[int, list[float]] = {}

    def evaluate(proposal: Any, _step: int) -> float:
        generations.setdefault(searched.generation, []).append(num_ones(proposal.genome))
        return num_ones(proposal.genome)

    simulated = simulate(searched, evaluate, workers=4)
    genomes = [tuple(trial.proposal.genome.values()) for trial in simulated.trials.values()]
    assert len(set(genomes)) == len(genomes)
    last = max(generations)
    assert np.mean(generations[last]) > np.mean(generations[0]) + 4
    assert max(generations[last]) > max(generations[0]) + 1
    assert simulated.best.score == max(map(max, generations.values()))


def test_a_generation_with_failures_goes_on() -> None:
    def evaluate(proposal: Any, _step: int) -> float:
        if proposal.genome["stage0.bit0"]:
            raise MemoryError
        return num_ones(proposal.genome)

    searched = method(trials=200)
    simulated = simulate(searched, evaluate, workers=3)
    assert searched.generation > 3
    assert simulated.best.proposal.genome["stage0.bit0"] == 0


def test_other_than_bits_is_refused() -> None:
    with pytest.raises(ConfigError, match="two options"):
        method(architecture=Cell(nodes=2))
    with pytest.raises(ConfigError, match="two options"):
        method(space={"train.optimizer.lr": Uniform(0.0, 1.0)})
    with pytest.raises(ConfigError, match="`genetic`"):
        method(architecture=_Own())


class _Own:
    def sample(self, rng: np.random.Generator) -> Any:
        return Candidate()

    def mutate(self, genome: Any, rng: np.random.Generator) -> Any:
        return genome

    def crossover(self, a: Any, b: Any, rng: np.random.Generator) -> Any:
        return a

    def build(self, genome: Any, input_shape: Any, num_outputs: int) -> Any:
        raise AssertionError("nothing is built here")
