"""A recursive network over Boolean expressions, as nodes that send messages and as plain calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from orchestray.trainers.survey.message_driven.nodes import (
    Broadcast,
    Group,
    Junction,
    Loss,
    Node,
    Parameterised,
    Pump,
    State,
    Stepper,
    loss_of_place,
)
from orchestray.trainers.survey.message_driven.trees import LEAVES, OPERATORS, Tree


@dataclass(frozen=True)
class Settings:
    """Settings of a training.

    Args:
        max_active: trees under way at once, at most.
        update_every: trees whose gradients make one step of a node.
        lr: step size.
        width: size of the vector of a place.
        seed: seed of the initial parameters.
    """

    max_active: int = 1
    update_every: int = 1
    lr: float = 0.3
    width: int = 16
    seed: int = 0

    @property
    def most_stale(self) -> int:
        """Updates of a node between the two ways of a message, at most."""
        return -(-2 * (self.max_active - 1) // self.update_every)


def make_modules(settings: Settings) -> dict[str, nn.Module]:
    """Return the parts with parameters by the names of their nodes, the same at each call."""
    width = settings.width
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        modules: dict[str, nn.Module] = {"leaf": nn.Embedding(len(LEAVES), width), "answer": nn.Linear(width, 2)}
        for word, (arity, _) in OPERATORS.items():
            first = nn.Linear(arity * width, width)
            modules[word] = nn.Sequential(first, nn.Tanh(), nn.Linear(width, width), nn.Tanh())
    return {name: module.double() for name, module in modules.items()}


def uses(name: str, tree: Tree) -> int:
    """Return how many messages a tree sends through a node with parameters."""
    if name == "answer":
        return len(tree.words)
    return sum(len(tree.places(word)) for word in (LEAVES if name == "leaf" else (name,)))


def make_nodes(trees: Sequence[Tree], settings: Settings) -> dict[str, Node]:
    """Return the nodes of the network by name.

    Leaves come from the `pump`. The vector of each place goes to `answer`, and to the operator above it. An operator
    joins the vectors of its operands, and its cell makes the vector of its own place of them.
    """
    following = {"leaf": "places", "answer": "loss"}
    nodes: list[Node] = [
        Pump("pump", "leaf", trees, settings.max_active),
        Junction("places", lambda _: "copies"),
        Broadcast("copies", _readers),
        Group("operands", "operator"),
        Junction("operator", lambda state: state.tree.words[state.place]),
        Loss("loss"),
    ]
    for name, module in make_modules(settings).items():
        stepper = Stepper(module, settings.lr, settings.update_every)
        nodes.append(Parameterised(name, following.get(name, "places"), module, stepper, partial(uses, name)))
    return {node.name: node for node in nodes}


def _readers(state: State) -> Sequence[str]:
    return ("answer",) if state.tree.parents[state.place] < 0 else ("answer", "operands")


def weights_of(modules: Mapping[str, nn.Module]) -> Tensor:
    """Return all parameters as one vector, by the names of their nodes."""
    parameters = [each for name in sorted(modules) for each in modules[name].parameters()]
    return nn.utils.parameters_to_vector(parameters).detach()


def trained_in_order(trees: Sequence[Tree], settings: Settings) -> Tensor:
    """Return all parameters after plain SGD: one tree after the other, by autograd through all of it.

    Args:
        trees: samples.
        settings: settings; `max_active` has no part in it.
    """
    modules = make_modules(settings)
    steppers = {name: Stepper(module, settings.lr, settings.update_every) for name, module in modules.items()}
    for tree in trees:
        outputs: list[Tensor] = []
        for word, children in zip(tree.words, tree.children, strict=True):
            if children:
                outputs.append(modules[word](torch.cat([outputs[child] for child in children])))
            else:
                outputs.append(modules["leaf"](torch.tensor(LEAVES.index(word))))
        losses = [loss_of_place(modules["answer"](each), tree, place) for place, each in enumerate(outputs)]
        torch.autograd.backward(torch.stack(losses).sum())
        for name, stepper in steppers.items():
            if uses(name, tree):
                stepper.count_tree()
    for stepper in steppers.values():
        stepper.step()
    return weights_of(modules)
