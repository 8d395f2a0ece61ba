"""Levels rise in complexity, are grown from the best of the level before, and need fewer networks than a policy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from orchestray.platform.errors import ConfigError
from orchestray.search.methods.base import Finished, Proposal, rng_of
from orchestray.search.methods.controllers.progressive import Progressive
from orchestray.search.methods.controllers.surrogate import Surrogate, describe
from orchestray.search.simulation.virtual_time import simulate
from orchestray.search.spaces.architectures.cell import Cell
from support.toy_choices import Cells, Layers, cell_score, layer_score


def score(proposal: Proposal, _step: int) -> float:
    return cell_score(proposal.genome)


def test_levels_rise_and_each_network_keeps_all_of_one_of_the_best_before() -> None:
    method = Progressive(space={}, architecture=Cells(3), seed=0, beam=4, grow_by="nodes")
    result = simulate(method, score, workers=3)
    levels: dict[int, list] = {}
    for trial in result.trials.values():
        levels.setdefault(trial.proposal.genome["nodes"], []).append(trial.proposal.genome)
    assert [len(levels[nodes]) for nodes in (1, 2, 3)] == [4, 4, 4]
    assert [trial.proposal.genome["nodes"] for trial in result.trials.values()] == [1] * 4 + [2] * 4 + [3] * 4
    for nodes in (2, 3):
        smaller = [{name: value for name, value in one.items() if name != "nodes"} for one in levels[nodes - 1]]
        assert all(any(one.items() >= parent.items() for parent in smaller) for one in levels[nodes])


def test_without_a_growing_choice_the_choices_are_opened_in_stretches() -> None:
    method = Progressive(space={}, architecture=Layers(3), seed=0, beam=5, levels=3, trials=40)
    result = simulate(method, lambda proposal, _step: layer_score(proposal.genome))
    first = [trial.proposal.genome for trial in result.trials.values()][:5]
    assert all(genome.get("2.kind", "dense") == "dense" for genome in first), "not open yet: the first option"
    keys = [str(trial.proposal.genome) for trial in result.trials.values()]
    assert len(keys) == len(set(keys)) <= 40


def test_proposals_do_not_depend_on_the_order_of_ends_and_no_more_than_the_beam_run_at_once() -> None:
    def run(workers: int) -> tuple[list, int]:
        running, most = set(), 0
        method = Progressive(space={}, architecture=Cells(3), seed=3, beam=5, grow_by="nodes", trials=20)
        ask, tell = method.ask, method.tell

        def counted_ask() -> Proposal | None:
            nonlocal most
            proposal = ask()
            if proposal is not None:
                running.add(proposal.trial)
                most = max(most, len(running))
            return proposal

        def counted_tell(finished) -> None:
            running.discard(finished.trial)
            tell(finished)

        method.ask, method.tell = counted_ask, counted_tell
        seconds = rng_of(workers).random(1000)
        result = simulate(method, score, workers=workers, seconds_per_step=lambda one: 1 + float(seconds[one.trial]))
        return [trial.proposal.genome for trial in result.trials.values()], most

    (alone, _), (together, most) = run(1), run(50)
    assert alone == together
    assert most == 5


def test_surrogate_trained_on_small_cells_ranks_larger_ones() -> None:
    space = Cells(3)
    cells = [space.decisions_of(genome) for genome in space.enumerate()]
    scores = np.array([cell_score(space.genome_of(one)) for one in cells])
    nodes = np.array([one[0].value for one in cells])
    surrogate = Surrogate(seed=0)
    small = [index for index in range(len(cells)) if nodes[index] <= 2]
    surrogate.fit([describe(cells[index]) for index in small], scores[small])
    large = rng_of(5).choice(np.flatnonzero(nodes == 3), 200, replace=False)
    predicted = surrogate.predict([describe(cells[index]) for index in large])
    ranks = [np.argsort(np.argsort(values)) for values in (predicted, scores[large])]
    assert np.corrcoef(*ranks)[0, 1] > 0.6


def test_failures_do_not_stop_the_levels() -> None:
    def failing(proposal: Proposal, step: int) -> float:
        if proposal.trial % 2:
            raise RuntimeError("out of memory")
        return score(proposal, step)

    result = simulate(Progressive(space={}, architecture=Cells(3), beam=4, grow_by="nodes"), failing)
    assert max(trial.proposal.genome["nodes"] for trial in result.trials.values()) == 3


def test_an_unknown_growing_choice_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no choice named 'depth'; it makes 0\.input, 0\.operation"):
        Progressive(space={}, architecture=Cells(2), grow_by="depth")


def test_cells_grow_by_their_nodes_and_each_is_a_network_of_the_space() -> None:
    space = Cell(nodes=3, operations=("identity", "conv_3x3", "max_3x3"), channels=2, reductions=0)
    method = Progressive(space={}, architecture=space, seed=0, beam=5, grow_by="nodes")

    def convolutions(proposal: Proposal, _step: int) -> float:
        return float(sum(value == "conv_3x3" for value in proposal.genome.values()))

    result = simulate(method, convolutions, workers=2)
    genomes = [trial.proposal.genome for trial in result.trials.values()]
    assert [len(genome) // 4 for genome in genomes] == [1] * 5 + [2] * 5 + [3] * 5
    assert [space.build(genome, (1, 8, 8), 10)(torch.zeros(2, 1, 8, 8)).shape for genome in genomes[::5]] == [
        (2, 10)
    ] * 3
    assert result.best.score == 6.0


def test_after_a_level_that_all_failed_the_next_is_drawn_among_all_its_candidates() -> None:
    method = Progressive(space={}, architecture=Cells(3), seed=0, beam=4, grow_by="nodes")
    first = [method.ask() for _ in range(4)]
    for trial in range(4):
        method.tell(Finished(trial, "failed"))
    second = [method.ask() for _ in range(4)]
    parents = set()
    for proposal in second:
        assert proposal is not None
        parents |= {p.trial for p in first if p and {**p.genome, "nodes": 2}.items() <= proposal.genome.items()}
    assert len(parents) > 1
