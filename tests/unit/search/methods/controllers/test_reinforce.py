"""The controller's gradient is that of the expected score, and its replicas share their parameters by versions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from orchestray.platform.errors import ConfigError
from orchestray.search.config.load import load_search_config
from orchestray.search.methods.base import Finished, Proposal, rng_of
from orchestray.search.methods.controllers import server as server_module
from orchestray.search.methods.controllers.answering import Questions
from orchestray.search.methods.controllers.policy import Policy, Vocabulary, policy_gradient
from orchestray.search.methods.controllers.reinforce import Reinforce
from orchestray.search.methods.controllers.server import ParameterServer
from orchestray.search.registry.check import method_of, space_of
from orchestray.search.simulation.virtual_time import simulate
from orchestray.search.spaces.architectures.base import Genome
from orchestray.search.spaces.architectures.chain import Chain
from orchestray.search.spaces.architectures.choices import Decision
from orchestray.search.spaces.dimensions import Choice, Uniform
from orchestray.trainers.ps.protocol.partition import ALIGNMENT
from support.layers import ROOT
from support.toy_choices import Cells, Layers, cell_score, layer_score

torch.set_num_threads(1)


def score(proposal: Proposal, _step: int) -> float:
    return layer_score(proposal.genome)


def all_answers(space: Layers) -> list:
    return [space.decisions_of(genome) for genome in space.enumerate()]


def test_probabilities_of_all_genomes_sum_to_one_and_are_those_that_are_drawn() -> None:
    space = Layers(2)
    policy = Policy(Vocabulary(), hidden=6, seed=3)
    answers = all_answers(space)
    logs, entropies = policy.log_probabilities(answers)
    assert float(logs.exp().sum()) == pytest.approx(1.0, abs=1e-12)
    assert float(entropies.min()) > 0
    drawn = [policy.draw(Questions({}, space, "test"), rng_of(1, index)) for index in range(2000)]
    keys = {str(answer): index for index, answer in enumerate(answers)}
    counts = np.bincount([keys[str(one)] for one in drawn], minlength=len(answers))
    expected = 2000 * np.asarray(logs.exp())
    # Pearson's statistic of 24 degrees of freedom is beyond 55 once in 3,000 times.
    assert float(((counts - expected) ** 2 / expected).sum()) < 55


def test_policy_gradient_in_expectation_is_the_finite_difference_of_the_expected_score() -> None:
    space = Layers(2)
    policy = Policy(Vocabulary(), hidden=5, seed=1)
    answers = all_answers(space)
    scores = torch.tensor([layer_score(space.genome_of(one)) for one in answers], dtype=torch.float64)
    policy.log_probabilities(answers)
    generator = torch.Generator().manual_seed(0)
    policy.parameters = {
        name: tensor + 0.5 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        for name, tensor in policy.parameters.items()
    }

    def expected() -> float:
        return float((policy.log_probabilities(answers)[0].exp() * scores).sum())

    probabilities = policy.log_probabilities(answers)[0].exp()
    for baseline in (0.0, 0.7):  # a baseline leaves the expectation as it is
        weights = (probabilities * (scores - baseline) * len(answers)).tolist()
        gradients = policy_gradient(policy, answers, weights)
        for name, tensor in policy.parameters.items():
            for place in [0, tensor.numel() // 2, tensor.numel() - 1]:
                flat, delta = tensor.view(-1), 1e-5
                flat[place] += delta
                above = expected()
                flat[place] -= 2 * delta
                below = expected()
                flat[place] += delta
                difference = (above - below) / (2 * delta)
                assert float(gradients[name].view(-1)[place]) == pytest.approx(difference, abs=1e-8), name


def test_policy_comes_to_the_planted_best() -> None:
    found = []
    for seed in range(6):
        method = Reinforce(space={}, architecture=Layers(3), seed=seed, trials=60, learning_rate=0.03)
        result = simulate(method, score)
        greedy = method.controllers[0].draw(Questions({}, Layers(3), "test"), rng_of(0), greedy=True)
        found.append((result.best.score, layer_score(Layers(3).genome_of(greedy))))
    # 60 of 125 networks: drawn evenly, 5 of 6 seeds would find the best once in 11 times.
    assert sum(best == 1.0 for best, _ in found) >= 5, found
    assert sum(greedy == 1.0 for _, greedy in found) >= 5, found


def test_the_controller_of_the_config_sets_the_parameters_of_a_fixed_number_of_layers() -> None:
    config = load_search_config(ROOT / "configs/search/digits-reinforce.yaml")
    method, space = method_of(config, trials=200), space_of(config)
    assert isinstance(space, Chain)

    def layers_of(genome: Genome) -> list[dict[str, Any]]:
        return space.layers_of(genome)

    def reward(proposal: Proposal, _step: int) -> float:
        return sum((each["kernel"] == 5) + (each["channels"] == 16) for each in layers_of(proposal.genome)) / 6

    trials = simulate(method, reward).trials
    for trial in trials.values():
        layers = layers_of(trial.proposal.genome)
        assert [each["kind"] for each in layers] == ["conv"] * 3
        assert [{"kernel", "channels"} <= each.keys() for each in layers] == [True] * 3
        assert ("stride" in layers[0], "skip" in layers[2]) == (True, True)
    scores = [trials[index].score or 0.0 for index in range(len(trials))]
    assert max(scores) == 1.0  # one network in 64 has that
    assert np.mean(scores[-30:]) > np.mean(scores[:30]) + 0.2


def test_no_network_is_tried_twice_and_a_settled_policy_ends_the_search() -> None:
    method = Reinforce(space={}, architecture=Layers(1), seed=0, trials=50, repeats=30)
    result = simulate(method, score, workers=3)
    genomes = [str(trial.proposal.genome) for trial in result.trials.values()]
    assert len(genomes) == len(set(genomes)) <= 5
    assert method.is_done


def test_proposals_of_one_controller_do_not_depend_on_the_order_of_ends() -> None:
    def run(workers: int) -> list:
        method = Reinforce(space={}, architecture=Layers(3), seed=4, trials=40, children=6)
        seconds = rng_of(workers).random(1000)
        result = simulate(
            method, score, workers=workers, seconds_per_step=lambda proposal: 1 + float(seconds[proposal.trial])
        )
        return [result.trials[trial].proposal.genome for trial in range(len(result.trials))]

    assert run(1) == run(6)


def test_controllers_push_to_shards_of_one_version_and_are_stale_by_the_others_updates() -> None:
    method = Reinforce(space={}, architecture=Layers(3), seed=2, trials=60, children=4, controllers=3, shards=2)
    simulate(method, score, workers=12)
    server = method.server
    assert server.versions == [len(method.staleness)] * 2
    assert sum(replica.updates for replica in method.replicas) == len(method.staleness)
    sizes = [machine.shard.values.numel() for machine in server.machines]
    assert sum(sizes) == sum(tensor.numel() for tensor in server.fetch().values())
    assert abs(sizes[0] - sizes[1]) <= 2 * ALIGNMENT
    assert 0 < max(method.staleness) <= server.versions[0]
    assert all(bool(machine.shard.values.any()) for machine in server.machines)


def test_more_options_than_there_was_room_for_keep_what_was_learned() -> None:
    def learned(rooms: list[int]) -> list[dict[str, Tensor]]:
        policy = Policy(Vocabulary(), hidden=4, seed=1)
        server = ParameterServer(policy.parameters, shards=2)
        found = []
        for number in range(1, 4):
            policy.vocabulary.rows("kind", list(range(30 * number)))
            decisions = [[Decision("kind", tuple(range(30 * number)), 30 * number - 1)]]
            gradients = policy_gradient(policy, decisions, [1.0])
            assert server.push(gradients, server.versions, number=number) == [0, 0]
            rooms.append(len(server.fetch()["option.bias"]))
            policy.adopt(server.fetch())
            found.append(policy.parameters)
            assert all(tensor.shape == gradients[name].shape for name, tensor in policy.parameters.items())
        return found

    rooms: list[int] = []
    found = learned(rooms)
    assert rooms == [64, 64, 128]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_module, "_LEAST_ROWS", 256)
        roomy = learned(rooms)
    assert rooms[3:] == [256] * 3
    for narrow, wide in zip(found, roomy, strict=True):
        assert all(torch.equal(narrow[name], wide[name]) for name in narrow)


def test_failed_networks_count_as_the_worst_and_the_search_goes_on() -> None:
    def sometimes(proposal: Proposal, step: int) -> float:
        if proposal.trial % 3 == 1:
            raise ValueError("does not fit")
        return score(proposal, step)

    result = simulate(Reinforce(space={}, architecture=Layers(3), seed=0, trials=30), sometimes)
    assert len(result.trials) == 30
    assert {trial.status for trial in result.trials.values()} == {"succeeded", "failed"}


def test_the_same_calls_give_the_same_proposals() -> None:
    def calls() -> list:
        method = Reinforce(space={}, architecture=Cells(5), seed=9, trials=150, entropy_weight=0.05)
        proposals = []
        while (proposal := method.ask()) is not None:
            proposals.append(proposal)
            method.tell(Finished(proposal.trial, "succeeded", 1, cell_score(proposal.genome)))
        return proposals

    assert calls() == calls()


def test_hyper_parameters_are_chosen_beside_and_without_an_architecture() -> None:
    space = {"train.batch_size": Choice((32, 64)), "train.optimizer.lr": Uniform(0.0, 1.0)}
    beside = Reinforce(space=space, architecture=Layers(1), seed=0, trials=5)
    proposal = beside.ask()
    assert proposal is not None
    assert set(proposal.changes) == set(space)
    assert "0.kind" in proposal.genome
    alone = Reinforce(space=space, seed=0, trials=5).ask()
    assert alone is not None
    assert alone.genome is None
    assert 0 < alone.changes["train.optimizer.lr"] < 1


def test_a_space_that_is_no_program_of_choices_is_refused_with_what_would_fit() -> None:
    class Own:
        def sample(self, rng): ...
        def mutate(self, genome, rng): ...
        def crossover(self, a, b, rng): ...
        def build(self, genome, input_shape, num_outputs): ...

    with pytest.raises(ConfigError, match=r"Own is none.*ChoiceSpace.*regularized_evolution"):
        Reinforce(space={}, architecture=Own())
    with pytest.raises(ConfigError, match="no architecture is searched"):
        Reinforce(space={})


def test_a_batch_that_fails_before_any_trial_has_a_score_teaches_nothing() -> None:
    method = Reinforce(space={}, architecture=Layers(3), children=2, trials=20)
    for status, reached in (("failed", None), ("succeeded", -3.0)):
        for proposal in [method.ask(), method.ask()]:
            assert proposal is not None
            method.tell(Finished(proposal.trial, status, 1, reached))
    assert method.baseline == -3.0
    assert [replica.updates for replica in method.replicas] == [1]
