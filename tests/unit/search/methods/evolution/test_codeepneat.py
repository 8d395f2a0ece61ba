"""CoDeepNEAT: what is assembled, who gets the credit, and what evolves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Finished, Proposal
from orchestray.search.methods.evolution.codeepneat import CoDeepNeat
from orchestray.search.simulation.virtual_time import simulate
from orchestray.search.spaces.architectures.cell import Cell
from orchestray.search.spaces.architectures.modules import Modules
from orchestray.search.spaces.dimensions import Uniform

LR = {"train.optimizer.lr": Uniform(1e-3, 1.0, is_log=True)}


def space() -> Modules:
    return Modules(channels=(2, 4), stem=2, max_halvings=1)


def method(**arguments: Any) -> CoDeepNeat:
    given: dict[str, Any] = {"space": LR, "architecture": space(), "trials": 200}
    return CoDeepNeat(**{**given, **arguments})


def fitness(proposal: Proposal, _step: int = 0) -> float:
    """Return a score for kernels of 3, many nodes, and a learning rate of 0.1."""
    kernels = [
        value for module in proposal.genome["modules"] for name, value in (module or {}).items() if "kernel" in name
    ]
    lr = abs(np.log10(proposal.changes["train.optimizer.lr"]) + 1)
    return float(np.mean([kernel == 3 for kernel in kernels]) + proposal.genome["blueprint"]["nodes"] / 4 - lr)


def test_assembled_networks_are_valid() -> None:
    searched, network_space = method(trials=60), space()
    simulated = simulate(searched, fitness, workers=3)
    for trial in simulated.trials.values():
        network = network_space.build(trial.proposal.genome, (1, 8, 8), 3)
        assert network(torch.rand(2, 1, 8, 8)).shape == (2, 3)


def test_the_credit_of_a_part_is_the_mean_of_the_networks_it_is_in() -> None:
    searched = method(networks=30)
    scores: dict[str, float] = {}
    for number, assembly in enumerate(searched.members):
        scores.setdefault(assembly.key, float(number) ** 1.5)
    searched.credit([scores[assembly.key] for assembly in searched.members])
    members = [*searched.blueprints.members, *searched.modules.members]
    for part in members:
        within = [scores[one.key] for one in searched.members if any(used is part for used in one.parts)]
        assert part.credit == (pytest.approx(np.mean(within)) if within else None)
    assert sum(part.credit is not None for part in members) > 15
    for number, assembly in enumerate(searched.members):
        assert assembly.parts[0] is searched.blueprints.members[number % 10]


def test_architecture_and_hyper_parameters_improve_together() -> None:
    gains, lrs = [], []
    for seed in range(4):
        searched = method(trials=240, seed=seed)
        simulated = simulate(searched, fitness, workers=4)
        scores = [trial.score or 0.0 for trial in simulated.trials.values()]
        gains.append(np.mean(scores[-60:]) - np.mean(scores[:20]))
        assert max(scores[-60:]) > max(scores[:20])
        lrs.append(abs(np.log10(simulated.best.proposal.changes["train.optimizer.lr"]) + 1))
    assert min(gains) > 0.3
    assert np.mean(lrs) < 0.3


def test_mutation_touches_both() -> None:
    searched = method()
    rng = np.random.default_rng(0)
    part = searched.blueprints.members[0].candidate
    mutants = [searched.blueprints.variation.mutate(part, rng)[0] for _ in range(40)]
    assert any(mutant.genome != part.genome for mutant in mutants)
    assert any(mutant.changes != part.changes for mutant in mutants)


def test_species_are_no_more_than_a_network_has_modules_and_sizes_stay() -> None:
    searched = method(trials=150)
    simulate(searched, fitness, workers=2)
    assert searched.generation > 3
    assert 1 < len(searched.modules.species) <= 3
    assert all(searched.modules.species)
    assert len(searched.modules.members) == sum(map(len, searched.modules.species)) == 15
    assert len(searched.blueprints.members) == 10


def test_networks_begin_with_one_node_of_one_layer_and_grow() -> None:
    searched = method(trials=240)
    assert {one.candidate.genome["blueprint"]["nodes"] for one in searched.members} == {1}
    assert {module["layers"] for one in searched.members for module in one.candidate.genome["modules"] if module} == {1}
    simulate(searched, fitness, workers=4)
    graphs = [part.candidate.genome for parts in (searched.blueprints, searched.modules) for part in parts.members]
    assert max(len(graph["nodes"]) for graph in graphs[:10]) == 4, "the score rises with the nodes"
    assert max(len(graph["nodes"]) for graph in graphs[10:]) > 1


def test_graphs_of_a_species_are_nearer_to_its_first_than_the_threshold_unless_there_are_as_many_as_may_be() -> None:
    searched = method(trials=150, compatibility=0.9)
    simulate(searched, fitness, workers=2)
    for parts, most in ((searched.blueprints, 3), (searched.modules, 3)):
        divided_by = parts.compatibility / (1.1 if len(parts.species) == most else 1 / 1.1)
        firsts = [species[0].candidate.genome for species in parts.species]
        for place, species in enumerate(parts.species):
            for part in species[1:]:
                distances = [parts.graphs.distance(part.candidate.genome, first) for first in firsts]
                assert distances[place] < divided_by or (len(firsts) == most and distances[place] == min(distances))
                assert all(distance >= divided_by for distance in distances[:place])


def test_the_number_of_workers_changes_nothing_and_nothing_is_evaluated_twice() -> None:
    def run(workers: int) -> list[str]:
        durations = np.random.default_rng(workers).exponential(size=200)
        simulated = simulate(
            method(trials=80), fitness, workers=workers, seconds_per_step=lambda one: float(durations[one.trial])
        )
        return [str((trial.proposal.genome, trial.proposal.changes)) for trial in simulated.trials.values()]

    first = run(1)
    assert first == run(8)
    assert len(set(first)) == len(first)


def test_a_generation_whose_every_network_fails_is_followed_by_another() -> None:
    searched = method(trials=60)
    for _ in range(60):
        proposal = searched.ask()
        assert proposal is not None
        searched.tell(Finished(proposal.trial, "failed", error="out of memory"))
    assert searched.generation >= 2


def test_other_spaces_are_refused() -> None:
    with pytest.raises(ConfigError, match="space: modules"):
        method(architecture=Cell(nodes=2))
