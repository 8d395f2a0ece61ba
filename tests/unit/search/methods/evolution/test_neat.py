"""NEAT: marks, species, networks, and who is evaluated."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.evolution.neat import Neat, Species
from orchestray.search.simulation.virtual_time import simulate
from orchestray.search.spaces.architectures.topology import Topology, TopologyGenome
from orchestray.search.spaces.dimensions import Uniform


def grown(space: Topology, num_mutations: int, seed: int) -> TopologyGenome:
    rng = np.random.default_rng(seed)
    genome = space.sample(rng)
    for _ in range(num_mutations):
        genome = space.mutate(genome, rng)
    return genome


def innovations(genome: TopologyGenome) -> list[int]:
    return [gene[0] for gene in genome["connections"]]


@pytest.mark.parametrize("seed", range(5))
def test_every_mutant_is_a_network_without_cycles_and_torch_and_numpy_agree_on_it(seed: int) -> None:
    space = Topology(inputs=3, outputs=2, activations=("sigmoid", "tanh", "gaussian", "sine", "relu", "absolute"))
    genome = grown(space, 60, seed)
    assert len(genome["nodes"]) > 2
    assert json.loads(json.dumps(genome)) == genome
    inputs = np.random.default_rng(seed).normal(size=(4, 3))
    network = space.build(genome, (3,), 2)
    answered = network(torch.tensor(inputs, dtype=torch.float32)).detach().numpy()
    np.testing.assert_allclose(answered, space.outputs_of(genome, inputs), rtol=1e-3, atol=1e-4)
    assert len(space.graph(genome).nodes) >= 6


def test_the_same_change_has_the_same_mark_wherever_it_happens() -> None:
    space = Topology(inputs=1, outputs=1)
    genomes = [grown(space, 30, seed) for seed in range(10)]
    between = {}
    for genome in genomes:
        for mark, source, target, *_ in genome["connections"]:
            assert between.setdefault(mark, (source, target)) == (source, target)
        assert innovations(genome) == sorted(set(innovations(genome)))
    assert len(set(between.values())) == len(between)


def test_a_new_node_leaves_the_old_weight_behind_it_and_one_before_it() -> None:
    space = Topology(inputs=1, outputs=1)
    rng = np.random.default_rng(0)
    before = space.sample(rng)
    after = space.with_node(before, rng)
    (split,) = [gene for gene in after["connections"] if not gene[4]]
    node = after["nodes"][0][0]
    into, out = after["connections"][-2:]
    assert into[1:] == [split[1], node, 1.0, True]
    assert out[1:] == [node, split[2], split[3], True]


def test_crossover_aligns_genes_by_their_marks() -> None:
    """Take matching genes from either parent, disjoint and excess ones from the fitter."""
    space = Topology(inputs=2, outputs=1)
    rng = np.random.default_rng(0)
    start = space.sample(rng)
    a, b = start, start
    for _ in range(4):
        a, b = space.with_weights(space.with_node(a, rng), rng), space.with_weights(space.with_connection(b, rng), rng)
        b = space.with_node(b, rng)
    assert set(innovations(a)) != set(innovations(b))
    by_mark = [{gene[0]: gene[3] for gene in genome["connections"]} for genome in (a, b)]
    from_b = 0
    for _ in range(50):
        child = space.crossover(a, b, rng)
        assert innovations(child) == innovations(a)
        assert child["nodes"] == a["nodes"]
        for mark, _source, _target, weight, _ in child["connections"]:
            assert weight in {by_mark[0][mark], by_mark[1].get(mark)}
            from_b += weight != by_mark[0][mark]
    matching = len(by_mark[0].keys() & by_mark[1].keys())
    assert 0.35 < from_b / (50 * matching) < 0.65


def test_distance_counts_genes_that_one_lacks_and_the_difference_of_weights() -> None:
    space = Topology(inputs=1, outputs=1)
    a = {"nodes": [], "connections": [[0, 0, 2, 1.0, True], [1, 1, 2, 0.0, True]]}
    b = {"nodes": [], "connections": [[0, 0, 2, 3.0, True], [5, 3, 2, 9.0, True], [6, 1, 3, 9.0, True]]}
    assert space.distance(a, b, 1.0, 0.4) == pytest.approx(3 + 0.4 * 2.0)
    assert space.distance(a, a, 1.0, 0.4) == 0.0


def test_a_generation_is_as_large_as_the_one_before_and_no_network_is_evaluated_twice() -> None:
    space = Topology(inputs=2, outputs=1)
    method = Neat(space={}, architecture=space, population=30, trials=300, seed=1)
    simulated = simulate(method, lambda proposal, _step: -sum(abs(gene[3]) for gene in proposal.genome["connections"]))
    proposals = [trial.proposal for trial in simulated.trials.values()]
    assert len(method.members) == 30
    assert all(proposal.steps == 0 for proposal in proposals)
    written = [json.dumps(proposal.genome) for proposal in proposals]
    assert len(set(written)) == len(written) == 300
    assert all(proposal.parent is None or proposal.parent < proposal.trial for proposal in proposals)


def test_the_number_of_workers_changes_nothing() -> None:
    def run(workers: int) -> list[str]:
        method = Neat(
            space={}, architecture=Topology(inputs=2, outputs=1), population=20, trials=120, seed=3, compatibility=1.0
        )
        durations = np.random.default_rng(workers).exponential(size=200)
        simulated = simulate(
            method,
            lambda proposal, _step: float(len(proposal.genome["nodes"]) - len(json.dumps(proposal.genome)) % 7),
            workers=workers,
            seconds_per_step=lambda proposal: float(durations[proposal.trial]),
        )
        return [json.dumps(trial.proposal.genome) for trial in simulated.trials.values()]

    assert run(1) == run(8)


def test_species_protect_what_is_new() -> None:
    """Put genomes of different structure into different species, each with a share of the offspring."""
    method = Neat(
        space={}, architecture=Topology(inputs=2, outputs=1), population=40, trials=400, seed=0, compatibility=1.0
    )
    simulate(method, lambda proposal, _step: -float(len(proposal.genome["nodes"])))
    assert len(method.species) > 1
    assert any(member.candidate.genome["nodes"] for member in method.members)


def test_other_spaces_and_hyper_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="topology"):
        Neat(space={"train.optimizer.lr": Uniform(0.0, 1.0)}, population=5)
    with pytest.raises(ConfigError, match="nothing for search"):
        Neat(space={"lr": Uniform(0.0, 1.0)}, architecture=Topology(inputs=1, outputs=1), population=5)
    with pytest.raises(ConfigError, match="inputs: 4, outputs: 3"):
        Topology(inputs=2, outputs=1).build({"nodes": [], "connections": []}, (2, 2), 3)


def test_a_species_makes_progress_by_any_objective_and_by_less_violation() -> None:
    species = Species(representative=None)  # type: ignore[arg-type]
    assert species.takes([(0.0, (1.0, 1.0))])
    assert not species.takes([(0.0, (1.0, 1.0)), (0.0, (0.5, 1.0)), (0.1, (9.0, 9.0))])
    assert species.takes([(0.0, (0.5, 2.0))])
    assert not species.takes([(0.0, (0.7, 1.0))])
    assert species.takes([(0.0, (2.0, 2.0))])
    assert species.front == [(0.0, (2.0, 2.0))]
    assert Species(None, front=[(0.3, (5.0,))]).takes([(0.2, (1.0,))])  # type: ignore[arg-type]
