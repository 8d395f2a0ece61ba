"""Architectures by reinforcement learning and by sequential models: the systems of the survey, on spaces whose best
network is known.
"""

from __future__ import annotations

import statistics
from itertools import accumulate

import torch

from orchestray.search.methods.base import Finished, Method
from orchestray.search.methods.controllers.progressive import Progressive
from orchestray.search.methods.controllers.reinforce import Reinforce
from orchestray.search.simulation.virtual_time import simulate
from support.toy_choices import Cells, cell_score

torch.set_num_threads(1)


def evaluated_until(method: Method, target: float, most: int) -> int:
    """Count the cells that a search evaluates, one after the other, until one scores as wanted."""
    for count in range(1, most + 1):
        proposal = method.ask()
        if proposal is None:
            return most
        score = cell_score(proposal.genome)
        if score >= target:
            return count
        method.tell(Finished(proposal.trial, "succeeded", 1, score))
    return most


def test_pnasnet_evaluates_fewer_cells_than_the_policy_to_reach_the_same_score() -> None:
    space, most = Cells(3), 400
    target = sorted(cell_score(genome) for genome in space.enumerate())[-4]
    counts: dict[str, list[int]] = {"progressive": [], "reinforce": []}
    for seed in range(7):
        grown = Progressive(space={}, architecture=space, seed=seed, beam=8, grow_by="nodes", trials=most)
        drawn = Reinforce(space={}, architecture=space, seed=seed, trials=most, learning_rate=0.02)
        counts["progressive"].append(evaluated_until(grown, target, most))
        counts["reinforce"].append(evaluated_until(drawn, target, most))
    medians = {name: statistics.median(values) for name, values in counts.items()}
    print(f"cells evaluated until {target:.2f} of {sum(1 for _ in space.enumerate())}: {counts}, medians {medians}")
    assert medians["progressive"] <= 0.5 * medians["reinforce"], counts


def test_smbo_runs_no_more_at_once_than_its_frontier_and_finds_the_planted_best() -> None:
    frontier, space = 6, Cells(3)
    best = max(cell_score(genome) for genome in space.enumerate())
    found = 0
    for seed in range(3):
        method = Progressive(space={}, architecture=space, seed=seed, beam=frontier, grow_by="nodes", trials=36)
        result = simulate(method, lambda proposal, _step: cell_score(proposal.genome), workers=100)
        changes = [(call.name == "ask" and call.answer is not None) - (call.name == "tell") for call in result.calls]
        assert max(accumulate(changes)) == frontier
        found += result.best.score == best
    assert found == 3, found
