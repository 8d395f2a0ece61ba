"""The nodes of a network that computes by messages: none has a clock, a thread, or a view of another node.

Source: Gaunt et al. 2017, "AMPNet: Asynchronous Model-Parallel Training for Dynamic Neural Networks", sections 3 and 4.

Each forward message comes back as one backward message with the same state. Until then a node keeps by the state what
it needs for the way back. So messages may arrive in any order, and those of many samples are under way at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.trainers.survey.message_driven.trees import LEAVES, Tree


class State(NamedTuple):
    """The state of a message: its sample, and where in the sample's tree it is."""

    instance: int
    place: int
    tree: Tree

    @property
    def key(self) -> tuple[int, int]:
        return self.instance, self.place

    def at(self, place: int) -> State:
        """Return the state of another place of the same tree."""
        return self._replace(place=place)


class Message(NamedTuple):
    """A message from one node to another: a vector on its way forward, or the gradient of the loss by it."""

    is_forward: bool
    sender: str
    to: str
    state: State
    payload: Tensor


class Node:
    """A node of the network: a message in, messages out.

    Args:
        name: name that messages for it carry.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def receive(self, message: Message) -> list[Message]:
        """Return the messages that follow from one."""
        return self._forward(message) if message.is_forward else self._backward(message)

    def _forward(self, message: Message) -> list[Message]:
        raise ValueError(f"nothing goes forward to {self.name}, got {message}")

    def _backward(self, message: Message) -> list[Message]:
        raise ValueError(f"nothing comes back to {self.name}, got {message}")

    def _ahead(self, to: str, state: State, payload: Tensor) -> Message:
        return Message(True, self.name, to, state, payload)

    def _back(self, to: str, state: State, payload: Tensor) -> Message:
        return Message(False, self.name, to, state, payload)


class Pump(Node):
    """The source of samples: each leaf of a tree is a message, and a tree whose leaves are all back is done.

    A tree starts only if fewer than `max_active` trees have started since the oldest that is not done. So between the
    start and the end of a tree at most `2 * (max_active - 1)` others end: the bound of all staleness.
    """

    def __init__(self, name: str, to: str, trees: Sequence[Tree], max_active: int) -> None:
        """
        Args:
            name: name of the node.
            to: node that leaves go to.
            trees: samples.
            max_active: trees under way at once, at most.
        """
        super().__init__(name)
        self._to, self._trees, self._max_active = to, trees, max_active
        self._started = 0
        self._leaves_left: dict[int, int] = {}
        self.most_active = 0
        """Trees that were under way at once, at most."""

    @property
    def is_done(self) -> bool:
        return self._started == len(self._trees) and not self._leaves_left

    def start(self) -> list[Message]:
        """Return the messages of all trees that may start now."""
        messages: list[Message] = []
        while self._started < min(min(self._leaves_left, default=self._started) + self._max_active, len(self._trees)):
            instance, tree = self._started, self._trees[self._started]
            leaves = [place for place, children in enumerate(tree.children) if not children]
            for place in leaves:
                word = torch.tensor(LEAVES.index(tree.words[place]))
                messages.append(self._ahead(self._to, State(instance, place, tree), word))
            self._leaves_left[instance] = len(leaves)
            self._started += 1
            self.most_active = max(self.most_active, len(self._leaves_left))
        return messages

    def _backward(self, message: Message) -> list[Message]:
        instance = message.state.instance
        self._leaves_left[instance] -= 1
        if self._leaves_left[instance]:
            return []
        del self._leaves_left[instance]
        return self.start()


class Junction(Node):
    """The place where ways of control meet (Phi) or part (Cond): a gradient goes back the way that its vector came.

    Args:
        name: name of the node.
        choose: returns where a message goes by its state.
    """

    def __init__(self, name: str, choose: Callable[[State], str]) -> None:
        super().__init__(name)
        self._choose = choose
        self._origins: dict[tuple[int, int], str] = {}

    def _forward(self, message: Message) -> list[Message]:
        self._origins[message.state.key] = message.sender
        return [self._ahead(self._choose(message.state), message.state, message.payload)]

    def _backward(self, message: Message) -> list[Message]:
        return [self._back(self._origins.pop(message.state.key), message.state, message.payload)]


class Broadcast(Node):
    """A node that sends a vector to several others, and adds up their gradients (Bcast)."""

    def __init__(self, name: str, choose: Callable[[State], Sequence[str]]) -> None:
        super().__init__(name)
        self._choose = choose
        self._waiting: dict[tuple[int, int], tuple[str, int, Tensor]] = {}

    def _forward(self, message: Message) -> list[Message]:
        to = self._choose(message.state)
        self._waiting[message.state.key] = message.sender, len(to), torch.zeros_like(message.payload)
        return [self._ahead(each, message.state, message.payload) for each in to]

    def _backward(self, message: Message) -> list[Message]:
        origin, left, total = self._waiting.pop(message.state.key)
        total = total + message.payload
        if left > 1:
            self._waiting[message.state.key] = origin, left - 1, total
            return []
        return [self._back(origin, message.state, total)]


class Group(Node):
    """A node that waits for all operands of a place and joins them; gradients are cut again (Group and Ungroup)."""

    def __init__(self, name: str, to: str) -> None:
        super().__init__(name)
        self._to = to
        self._waiting: defaultdict[tuple[int, int], dict[int, Tensor]] = defaultdict(dict)
        self._origins: dict[tuple[int, int], str] = {}

    def _forward(self, message: Message) -> list[Message]:
        state = message.state.at(message.state.tree.parents[message.state.place])
        operands = self._waiting[state.key]
        operands[message.state.place] = message.payload
        self._origins[message.state.key] = message.sender
        wanted = state.tree.children[state.place]
        if len(operands) < len(wanted):
            return []
        del self._waiting[state.key]
        return [self._ahead(self._to, state, torch.cat([operands[place] for place in wanted]))]

    def _backward(self, message: Message) -> list[Message]:
        places = message.state.tree.children[message.state.place]
        states = [message.state.at(place) for place in places]
        return [
            self._back(self._origins.pop(state.key), state, part)
            for state, part in zip(states, message.payload.chunk(len(places)), strict=True)
        ]


class Stepper:
    """The optimizer of one node: plain SGD on the mean of some trees' gradients.

    Args:
        module: module of the node.
        lr: step size.
        every: trees whose gradients make one step.
    """

    def __init__(self, module: nn.Module, lr: float, every: int) -> None:
        self._parameters = list(module.parameters())
        self._lr, self._every = lr, every
        self._trees = 0
        self.updates = 0
        """Steps made."""

    def count_tree(self) -> None:
        """Make a step if the gradients of enough trees are there."""
        self._trees += 1
        if self._trees == self._every:
            self.step()

    def step(self) -> None:
        """Make a step with the gradients that are there, if any."""
        if not self._trees:
            return
        with torch.no_grad():
            for each in self._parameters:
                if each.grad is not None:
                    each.sub_(each.grad, alpha=self._lr / self._trees)
                    each.grad = None
        self._trees = 0
        self.updates += 1


class Parameterised(Node):
    """A node with parameters, which it updates by itself as gradients come in (a parameterised payload transform).

    A gradient is that of the present parameters at the input of the way forward. The staleness is the number of updates
    in between. The paper counts messages to the next update. Here trees are counted that have all their messages back.
    So one tree at a time makes the steps of plain SGD.
    """

    def __init__(self, name: str, to: str, module: nn.Module, stepper: Stepper, uses: Callable[[Tree], int]) -> None:
        """
        Args:
            name: name of the node.
            to: node that outputs go to.
            module: from a vector to a vector.
            stepper: its optimizer.
            uses: messages that a tree sends through the node.
        """
        super().__init__(name)
        self.module, self.stepper = module, stepper
        self._to, self._uses = to, uses
        self._held: dict[tuple[int, int], tuple[str, Tensor, int]] = {}
        self._missing: dict[int, int] = {}
        self.staleness: Counter[int] = Counter()
        """Number of messages by the updates between their two ways."""

    def _forward(self, message: Message) -> list[Message]:
        self._held[message.state.key] = message.sender, message.payload, self.stepper.updates
        with torch.no_grad():
            return [self._ahead(self._to, message.state, self.module(message.payload))]

    def _backward(self, message: Message) -> list[Message]:
        state = message.state
        origin, x, updates = self._held.pop(state.key)
        self.staleness[self.stepper.updates - updates] += 1
        x = x.detach().requires_grad_(x.is_floating_point())
        self.module(x).backward(message.payload)
        self._missing[state.instance] = self._missing.get(state.instance, self._uses(state.tree)) - 1
        if not self._missing[state.instance]:
            del self._missing[state.instance]
            self.stepper.count_tree()
        return [self._back(origin, state, torch.zeros(0) if x.grad is None else x.grad)]


class Loss(Node):
    """The end of the way forward: cross-entropy of each place's value, as a mean over the places of a tree."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.losses: defaultdict[int, float] = defaultdict(float)
        """Loss by tree."""

    def _forward(self, message: Message) -> list[Message]:
        logits = message.payload.detach().requires_grad_()
        loss = loss_of_place(logits, message.state.tree, message.state.place)
        (gradient,) = torch.autograd.grad(loss, logits)
        self.losses[message.state.instance] += loss.item()
        return [self._back(message.sender, message.state, gradient)]


def loss_of_place(logits: Tensor, tree: Tree, place: int) -> Tensor:
    """Return the part of a tree's loss that one place has.

    Args:
        logits: of the values 0 and 1, [2].
        tree: the tree.
        place: the place.
    """
    return functional.cross_entropy(logits, torch.tensor(tree.values[place])) / len(tree.words)
