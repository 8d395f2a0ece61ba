"""The table comes to the values of value iteration, and only valid programs are ever drawn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchestray.search.methods.base import Finished, Proposal
from orchestray.search.methods.controllers.q_learning import QLearning, QTable, State
from orchestray.search.simulation.virtual_time import simulate
from orchestray.search.spaces.architectures.choices import ChoiceSpace
from orchestray.search.spaces.dimensions import Choice
from orchestray.search.spaces.registry import make_space
from support.toy_choices import Layers, layer_score

ROOT = Path(__file__).parents[5]


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


def blocks(most_layers: int) -> ChoiceSpace:
    """Return the space of configs/search/digits-blocks.yaml, of smaller blocks."""
    made = make_space(f"{ROOT}/configs/search/spaces/blocks.py:Blocks", most_layers=most_layers, channels=2)
    assert isinstance(made, ChoiceSpace)
    return made


def is_valid(code: Mapping[str, Any]) -> bool:
    """Return True if a block is one of table 1 of Zhong et al. (2018): each layer is fed by layers before it."""
    wanted, layer = set(), 1
    while f"{layer}.kind" in code and code[f"{layer}.kind"] != "terminal":
        kind = code[f"{layer}.kind"]
        fields = {"kind", "first"} | ({"kernel"} if kind == "convolution" else set())
        fields |= {"second"} if kind in ("add", "concat") else set()
        wanted |= {f"{layer}.{field}" for field in fields}
        if any(not 0 <= code.get(f"{layer}.{name}", 0) < layer for name in ("first", "second")):
            return False
        layer += 1
    wanted |= {f"{layer}.kind"} & code.keys()  # of the terminal
    return layer > 1 and code.keys() == wanted


def test_only_valid_block_codes_are_drawn_each_of_which_builds() -> None:
    space, rng = blocks(3), np.random.default_rng(0)
    of_second, of_third = 6 * 2 + 2 * 2**2, 6 * 3 + 2 * 3**2
    assert space.count() == 4 * (1 + of_second * (1 + of_third)), "by hand: of one, two or three layers"
    for number in range(80):
        code = space.sample(rng)
        assert is_valid(code), code
        if number < 25:
            assert space.build(code, (1, 8, 8), 3)(torch.rand(2, 1, 8, 8)).shape == (2, 3)


def test_a_planted_block_is_found_by_shaped_rewards_where_even_draws_miss_it() -> None:
    space = blocks(3)
    best = {"1.kind": "convolution", "1.kernel": 3, "1.first": 0, "2.kind": "convolution", "2.kernel": 5}
    best |= {"2.first": 1, "3.kind": "add", "3.first": 2, "3.second": 0}
    assert is_valid(best)

    def likeness(proposal: Proposal, _step: int) -> float:
        assert is_valid(proposal.genome)
        return sum(proposal.genome.get(name) == value for name, value in best.items()) / len(best)

    def num_found(**keys: Any) -> int:
        found = 0
        for seed in range(5):
            method = QLearning(space={}, architecture=space, trials=200, seed=seed, shaped=True, **keys)
            found += simulate(method, likeness).best.score == 1.0
        return found

    assert num_found() >= 4
    assert num_found(exploration=1.0) <= 2


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


def test_a_trial_that_fails_before_any_has_a_score_is_learnt_as_the_worst_once_there_is_one() -> None:
    method = QLearning(space={}, architecture=Layers(2), seed=9, trials=20, replay=0, learning_rate=0.5)
    proposals = [method.ask(), method.ask()]
    assert proposals[0] is not None
    assert proposals[1] is not None
    method.tell(Finished(0, "failed"))
    assert not any(any(values) for values in method.table.values.values())
    method.tell(Finished(1, "succeeded", 1, -3.0))
    for proposal in proposals:
        assert proposal is not None
        state, index = method.table.path(Layers(2).decisions_of(proposal.genome))[-1]
        assert method.table.values[state][index] == -1.5


@pytest.mark.parametrize(("memory", "kept"), [(None, (1, 2, 3)), (2, (2, 3)), (5, (1, 2, 3)), (0, ())])
def test_a_state_has_as_many_answers_before_it_as_the_memory_holds(memory: int | None, kept: tuple[int, ...]) -> None:
    assert QTable(memory=memory).state("next", ["a", "b"], [1, 2, 3]) == ("next", ("a", "b"), kept)


def test_draws_of_what_is_under_way_do_not_end_the_search_and_draws_of_what_has_ended_do() -> None:
    method = QLearning(space={"x": Choice((0, 1, 2))}, trials=9, repeats=1)
    under_way = [method.ask()]
    while (proposal := method.ask()) is not None:
        under_way.append(proposal)
    assert not method.is_done
    for proposal in under_way:
        assert proposal is not None
        method.tell(Finished(proposal.trial, "succeeded", 1, 0.5))
    while (proposal := method.ask()) is not None:
        method.tell(Finished(proposal.trial, "succeeded", 1, 0.5))
    assert method.is_done
