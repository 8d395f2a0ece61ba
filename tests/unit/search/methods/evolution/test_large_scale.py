"""Large-scale evolution and the space it grows networks in."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Proposal
from orchestray.search.methods.evolution.large_scale import LargeScaleEvolution
from orchestray.search.simulation.virtual_time import simulate
from orchestray.search.spaces.architectures.inherit import inherited
from orchestray.search.spaces.architectures.layer_graph import LayerGraph
from orchestray.search.spaces.dimensions import Uniform

LR = {"train.optimizer.lr": Uniform(1e-3, 1.0, is_log=True)}


def depth(proposal: Proposal, _step: int) -> float:
    return float(len(proposal.genome["layers"]))


def method(**arguments: Any) -> LargeScaleEvolution:
    given: dict[str, Any] = {"space": LR, "architecture": LayerGraph(), "population": 8, "trials": 200}
    return LargeScaleEvolution(**{**given, **arguments})


def test_every_mutation_yields_a_valid_network() -> None:
    space, rng = LayerGraph(first_channels=2, max_channels=8), np.random.default_rng(0)
    genome = space.trivial()
    done: Counter[str] = Counter()
    for _ in range(150):
        genome, name = space.alter(genome, rng)
        done[name] += 1
        assert json.loads(json.dumps(genome)) == genome
        assert len(genome["layers"]) <= space.max_layers
        outputs = space.build(genome, (1, 8, 8), 3)(torch.rand(2, 1, 8, 8))
        assert outputs.shape == (2, 3)
        outputs.sum().backward()
    assert set(done) == set(space.mutations)


def test_what_is_crossed_builds() -> None:
    space, rng = LayerGraph(start_mutations=25, first_channels=2, max_channels=8), np.random.default_rng(1)
    for _ in range(20):
        child = space.crossover(space.sample(rng), space.sample(rng), rng)
        ids = [layer["id"] for layer in child["layers"]]
        assert len(set(ids)) == len(ids)
        assert space.build(child, (64,), 3)(torch.rand(2, 64)).shape == (2, 3)


def test_a_child_keeps_the_names_of_the_layers_it_shares_so_that_it_takes_their_weights() -> None:
    space = LayerGraph()
    layers = [{"id": number, "channels": 4, "kernel": 3, "stride": 1} for number in (1, 2, 3)]
    parent = {"layers": layers, "skips": [[1, 3]]}
    child = {"layers": [layers[0], layers[2]], "skips": []}
    states = [space.build(genome, (1, 8, 8), 3).state_dict() for genome in (parent, child)]
    taken = inherited(*states)
    convolutions = {name for name in states[1] if "layer1" in name or "layer3" in name}
    assert convolutions <= set(taken)


def test_the_loser_of_a_pair_dies_and_the_winner_has_the_child() -> None:
    searched = method(trials=300)
    scores: dict[int, float] = {}
    seen_killed = 0
    while (proposal := searched.ask()) is not None:
        if len(searched.killed) > seen_killed:
            seen_killed += 1
            assert proposal.parent is not None
            assert scores[searched.killed[-1]] <= scores[proposal.parent]
        scores[proposal.trial] = depth(proposal, 1)
        searched.tell(_finished(proposal.trial, scores[proposal.trial]))
    assert seen_killed > 250
    assert len(searched.population) == 8


def test_it_grows_from_one_trivial_network_and_weights_are_handed_down() -> None:
    simulated = simulate(method(), depth, workers=4)
    proposals = [trial.proposal for trial in simulated.trials.values()]
    assert proposals[0].genome == {"layers": [], "skips": []}
    assert all(proposal.parent is not None for proposal in proposals[1:])
    kinds = Counter(proposal.change for proposal in proposals[4:])
    assert kinds["identity"] > 0
    assert kinds["reset weights"] > 0
    assert any(change.startswith("alter train.optimizer.lr") for change in kinds)
    assert all(proposal.inherits == (proposal.change != "reset weights") for proposal in proposals[4:])


def test_no_worker_ever_waits() -> None:
    durations = np.random.default_rng(0).exponential(size=300)
    simulated = simulate(
        method(), depth, workers=12, seconds_per_step=lambda proposal: float(durations[proposal.trial])
    )
    free_at = [0.0] * 12
    for trial in simulated.trials:
        free_at.sort()
        free_at[0] += durations[trial]
    assert simulated.makespan_s == pytest.approx(max(free_at))


def test_without_inheritance_no_network_is_evaluated_twice() -> None:
    simulated = simulate(method(inherit_weights=False, space={}), depth, workers=3)
    keys = [LayerGraph().key(trial.proposal.genome) for trial in simulated.trials.values()]
    assert len(set(keys)) == len(keys)
    assert not any(trial.proposal.inherits for trial in simulated.trials.values())


def test_a_population_of_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        method(population=1)


def _finished(trial: int, score: float) -> Any:
    from orchestray.search.methods.base import Finished

    return Finished(trial, "succeeded", 1, score)
