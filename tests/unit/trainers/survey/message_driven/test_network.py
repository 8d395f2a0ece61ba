"""A network whose nodes get their messages one by one, in any order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from orchestray.trainers.survey.message_driven.network import Settings, make_nodes, trained_in_order
from orchestray.trainers.survey.message_driven.nodes import Loss, Message, Parameterised, Pump, State, Stepper
from orchestray.trainers.survey.message_driven.trees import Tree, drawn, parsed
from orchestray.trainers.survey.message_driven.workers import Trained

Choose = Callable[[list[Message]], int]
"""Returns which of the messages under way arrives next."""


def at_random(seed: int) -> Choose:
    rng = random.Random(seed)
    return lambda messages: rng.randrange(len(messages))


def trained(trees: Sequence[Tree], settings: Settings, choose: Choose) -> tuple[Trained, Counter[tuple[object, ...]]]:
    """Return the network after all messages, and forward less backward messages of each way and state."""
    nodes = make_nodes(trees, settings)
    pump = nodes["pump"]
    assert isinstance(pump, Pump)
    open_ways: Counter[tuple[object, ...]] = Counter()
    messages = pump.start()
    while messages:
        message = messages.pop(choose(messages))
        ends = (message.sender, message.to) if message.is_forward else (message.to, message.sender)
        open_ways[*ends, *message.state.key] += 1 if message.is_forward else -1
        messages += nodes[message.to].receive(message)
    assert pump.is_done
    assert pump.most_active == min(settings.max_active, len(trees))
    whole = Trained(nodes, 0, 0.0)
    for node in whole.parameterised.values():
        node.stepper.step()
    return whole, open_ways


@pytest.mark.parametrize("update_every", [1, 3])
def test_one_tree_under_way_is_plain_sgd_in_any_order_of_messages(update_every: int) -> None:
    trees, settings = drawn(40, seed=0), Settings(max_active=1, update_every=update_every)
    exact = trained_in_order(trees, settings)
    assert (exact - trained_in_order(trees[:-1], settings)).abs().max() > 1e-4
    for seed in range(2):
        found, _ = trained(trees, settings, at_random(seed))
        assert (found.weights - exact).abs().max() < 1e-10
        assert {*found.staleness} == {0}


@pytest.mark.parametrize(("max_active", "update_every"), [(2, 1), (4, 1), (4, 3), (8, 2)])
def test_in_any_order_each_message_comes_back_all_trees_are_done_and_staleness_is_bounded(
    max_active: int, update_every: int
) -> None:
    trees, settings = drawn(40, seed=1), Settings(max_active=max_active, update_every=update_every)
    for seed in range(2):
        found, open_ways = trained(trees, settings, at_random(seed))
        assert not any(open_ways.values())
        loss = found.nodes["loss"]
        assert isinstance(loss, Loss)
        assert sorted(loss.losses) == [*range(40)]
        assert found.staleness.total() == sum(
            len(tree.words) + sum(word in found.parameterised for word in tree.words) + len(tree.places("true")) +
            len(tree.places("false")) for tree in trees
        )  # fmt: skip
        assert 0 < max(found.staleness) <= settings.most_stale


def test_one_tree_under_way_and_eight_come_to_a_low_loss_on_trees_never_seen() -> None:
    for max_active in (1, 8):
        found, _ = trained(drawn(400, seed=0), Settings(max_active=max_active), at_random(0))
        loss = found.nodes["loss"]
        assert isinstance(loss, Loss)
        assert sum(loss.losses[tree] for tree in range(300, 400)) / 100 < 0.1


def test_staleness_is_bounded_also_if_one_tree_comes_back_last() -> None:
    def last(messages: list[Message]) -> int:
        order = [
            (message.state.instance == 0 and not message.is_forward, place) for place, message in enumerate(messages)
        ]
        return min(order)[1]

    found, _ = trained(drawn(40, seed=2), Settings(max_active=4), last)
    assert max(found.staleness) <= Settings(max_active=4).most_stale == 6


def test_a_gradient_is_that_of_the_present_parameters_at_the_input_of_the_way_forward() -> None:
    module = nn.Linear(1, 1, bias=False).double()
    node = Parameterised("node", "next", module, Stepper(module, lr=1.0, every=1), lambda _: 1)
    weight, one = module.weight, torch.ones(1, dtype=torch.float64)
    weight.data.fill_(5.0)
    states = [State(instance, 0, parsed("true")) for instance in range(2)]
    for state in states:
        (message,) = node.receive(Message(True, "before", "node", state, 2 * one))
        assert (message.to, message.payload.item()) == ("next", 10.0)
    gradients = [node.receive(Message(False, "next", "node", state, one))[0] for state in states]
    assert [(each.to, each.payload.item()) for each in gradients] == [("before", 5.0), ("before", 3.0)]
    assert weight.item() == 1.0
    assert node.staleness == {0: 1, 1: 1}


def test_a_message_the_wrong_way_is_an_error() -> None:
    nodes = make_nodes([], Settings())
    state = State(0, 0, parsed("true"))
    for name, is_forward in (("pump", True), ("loss", False)):
        with pytest.raises(ValueError, match=f"nothing (goes forward|comes back) to {name}"):
            nodes[name].receive(Message(is_forward, "other", name, state, torch.zeros(2)))
