"""The table comes to the values of value iteration, and only valid programs are ever drawn."""

from __future__ import annotations

import pytest

from lab.search_simulation import simulate
from orchestray.search.methods.base import Finished, Proposal
from orchestray.search.methods.controllers.answering import Evaluations
from orchestray.search.methods.controllers.q_learning import QLearning, QTable, State
from support.toy_choices import Codes, Layers, layer_score


def score(proposal: Proposal, _step: int) -> float:
    return layer_score(proposal.genome)


def value_iteration(table: QTable, space: Layers, discount: float) -> dict[tuple[State, int], float]:
    """Return the value of each option by Bellman's equation, over all programs, when nothing changes any more."""
    paths = [(table.path(space.decisions_of(genome)), layer_score(genome)) for genome in space.enumerate()]
    values: dict[tuple[State, int], float] = {step: 0.0 for path, _ in paths for step in path}
    options: dict[State, set[int]] = {}
    for state, index in values:
        options.setdefault(state, set()).add(index)
    while True:
        old = dict(values)
        for path, reward in paths:
            for at, step in enumerate(path):
                if at + 1 == len(path):
                    values[step] = reward
                else:
                    ahead = path[at + 1][0]
                    values[step] = discount * max(values[ahead, index] for index in options[ahead])
        if old == values:
            return values


@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_table_is_that_of_value_iteration(discount: float) -> None:
    space = Layers(2)
    method = QLearning(
        space={},
        architecture=space,
        trials=25,
        memory=None,
        exploration=1.0,
        discount=discount,
        learning_rate=0.5,
        seed=1,
        replay=200,
    )
    result = simulate(method, score)
    assert len(result.trials) == 25, "each program of the space once"
    wanted = value_iteration(method.table, space, discount)
    for (state, index), value in wanted.items():
        assert method.table.values[state][index] == pytest.approx(value, abs=1e-3)


def test_shaped_rewards_of_a_path_sum_to_its_score() -> None:
    table = QTable(learning_rate=1.0)
    path = table.path(Layers(2).decisions_of({"0.kind": "pool", "1.kind": "dense", "1.width": 8}))
    table.update(path, 0.9, shaped=True)
    assert [float(table.values[state][index]) for state, index in path] == pytest.approx([0.9, 0.6, 0.3])


def test_epsilon_falls_as_in_the_paper() -> None:
    method = QLearning(space={}, architecture=Layers(3), trials=2700, exploration=1500 / 2700)
    assert method.epsilon(0) == method.epsilon(1499) == 1.0
    assert method.epsilon(1500) == 0.9
    assert method.epsilon(2699) == 0.1
    stretches = [sum(method.epsilon(trial) == tenth / 10 for trial in range(2700)) for tenth in range(1, 10)]
    assert all(133 <= stretch <= 134 for stretch in stretches)


def test_a_space_that_is_used_up_ends_the_search_and_no_network_is_tried_twice() -> None:
    method = QLearning(space={}, architecture=Layers(1), trials=50, seed=0)
    result = simulate(method, score, workers=2)
    genomes = [str(trial.proposal.genome) for trial in result.trials.values()]
    assert len(genomes) == len(set(genomes)) == 5
    assert method.is_done


def test_only_valid_block_codes_are_drawn_and_the_planted_block_is_found() -> None:
    space = Codes(3)
    programs = [dict(genome) for genome in space.enumerate()]
    best = {"1.kind": "convolution", "1.first": 0, "2.kind": "convolution", "2.first": 1, "3.kind": "add"}
    best |= {"3.first": 2, "3.second": 0}
    assert best in programs

    def likeness(proposal: Proposal, _step: int) -> float:
        return sum(proposal.genome.get(name) == value for name, value in best.items()) / len(best)

    found = 0
    for seed in range(5):
        result = simulate(QLearning(space={}, architecture=space, trials=80, seed=seed), likeness)
        assert all(trial.proposal.genome in programs for trial in result.trials.values())
        found += result.best.proposal.genome == best
    assert found >= 4, f"{found} of 5; drawn evenly, 80 of {len(programs)} blocks would have it in 1.5 of 5"


def test_the_same_calls_give_the_same_proposals() -> None:
    def calls() -> list:
        method = QLearning(space={}, architecture=Layers(5), seed=9, trials=200)
        proposals = []
        while (proposal := method.ask()) is not None:
            proposals.append(proposal)
            method.tell(Finished(proposal.trial, "succeeded", 1, layer_score(proposal.genome)))
        return proposals

    assert len(calls()) == 200
    assert calls() == calls()


def test_a_trial_that_failed_counts_as_the_worst_whatever_it_had_reported_before() -> None:
    evaluations = Evaluations()
    for trial, key in enumerate("abc"):
        evaluations.begin(key, trial)
    evaluations.end(Finished(0, "succeeded", 4, 0.5))
    evaluations.end(Finished(1, "failed", 2, 0.9))
    evaluations.end(Finished(2, "stopped", 2, 0.2))
    assert [evaluations.known(key) for key in "abc"] == [0.5, 0.2, 0.2]
