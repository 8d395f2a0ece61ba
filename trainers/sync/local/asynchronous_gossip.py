"""Gossip without waiting: a replica averages with a neighbour whatever that one is doing.

Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent" (2018), algorithm 1 (AD-PSGD).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.flat_tensors import FlatTensors
from orchestray.trainers.core.exchange import LocalTensor
from orchestray.trainers.layout.tensor_slice import TensorSlice
from orchestray.trainers.sync.common.local_updates import LocalUpdates
from orchestray.trainers.sync.local.answering import Links, PulledValues, Question
from orchestray.trainers.sync.local.mixing import Graph, fixed_graph

_LOOK_EVERY_STEPS = 10


class AsynchronousGossip(LocalUpdates):
    """Replicas that train alone; in every step each takes the mean with one neighbour, drawn at random:

        x_i, x_j <- (x_i + x_j) / 2,    then    x_i <- x_i + move_i

    The move is the optimizer's, from x_i at the beginning of the step. Threads of the neighbour answer at any time,
    also while it computes, so no replica waits for another one's step. What a replica gains in an exchange the other
    loses: the sum of all changes by the moves alone.

    The order of the exchanges depends on how long steps take, so that a run cannot be repeated bit for bit. When the
    training ends all take the exact mean.

    Args:
        graph: "random" (any other replica), "ring", "complete" or {"edges": pairs of ranks}.
        seed: seed of the draws.
    """

    def __init__(self, graph: Graph = "random", seed: int = 0) -> None:
        super().__init__()
        self._graph: Graph = "complete" if graph == "random" else graph
        self._name = graph if isinstance(graph, str) else "edges"
        self._seed = seed
        self._flat = FlatTensors([])
        self._neighbours: Neighbours | None = None
        self._base: list[Tensor] = []
        """Model at the beginning of the step."""
        self._asked: Question | None = None
        self._num_asked = self._num_answered = 0
        self._bytes_of_earlier = 0

    def attach(self, model: nn.Module, collective: Collective, pieces: Mapping[str, TensorSlice] | None = None) -> None:
        super().attach(model, collective, pieces)
        self._flat = FlatTensors(self._shared)

    def detach(self) -> None:
        self._part()
        self._base, self._asked = [], None
        super().detach()

    @torch.no_grad()
    def before_step(self, step: int) -> None:
        super().before_step(step)
        self.step_metrics = {}
        if self.joined().size == 1:
            return
        neighbours = self._known()
        self._base = neighbours.values.values()
        self._flat.unpack(self._base)  # with what others have changed since this replica's last step
        draw = np.random.default_rng([self._seed, step, self.joined().rank])
        self._asked = neighbours.links.ask(int(draw.choice(neighbours.ranks)), self._base)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        asked, self._asked = self._asked, None
        if asked is None:
            return
        moves = self._flat.pack()
        torch._foreach_sub_(moves, self._base)
        pulls = asked.wait()
        neighbours = self._known()
        self._flat.unpack(neighbours.values.moved(moves, pulls))
        self._num_asked += 1
        self._count()
        if (step - 1) % _LOOK_EVERY_STEPS == 0:
            size = self.joined().size
            square = sum(float((2 * pull).double().square().sum()) for pull in pulls)
            self.step_metrics = {"disagreement": (square * (size - 1) / (2 * size)) ** 0.5}

    def _known(self) -> Neighbours:
        """Return the connections to the neighbours, made before the first step. All replicas come here together."""
        if self._neighbours is None:
            self._neighbours = Neighbours(self._flat.pack(), self.joined(), self._graph)
        return self._neighbours

    @torch.no_grad()
    def agree(self) -> None:
        self._settle()
        super().agree()

    def state(self) -> dict[str, LocalTensor]:
        """Have the model hold what all exchanges so far have made of it; there is no other state. All call this."""
        self._settle()
        return {}

    def wanted(self) -> dict[str, TensorSlice]:
        return {}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin again from the model, which was loaded. All replicas call this."""
        self._part()

    def summary(self) -> dict[str, Any]:
        """Return the run's summary of the graph, and of the exchanges that this replica began and that it answered."""
        return {
            "graph": self._name,
            "consistency": "asynchronous",
            "replicas": self.joined().size,
            "begun": self._num_asked,
            "answered": self._num_answered,
        }

    def _settle(self) -> None:
        if self._neighbours is not None:
            self.joined().barrier()  # after the last exchange of each
            self._count()
            self._flat.unpack(self._neighbours.values.values())

    def _count(self) -> None:
        assert self._neighbours is not None
        self._num_answered = self._neighbours.values.num_answered
        self.asked_bytes = self._bytes_of_earlier + self._neighbours.links.asked_bytes

    def _part(self) -> None:
        if self._neighbours is not None:
            self._neighbours.links.close()
            self._bytes_of_earlier = self.asked_bytes
            self._neighbours = None


class Neighbours:
    """A replica's values as its neighbours see them, and the links to each: it asks, and it answers.

    Args:
        start: values that it begins with; taken over.
        collective: the replicas. All make their end at the same time.
        graph: the neighbours.

    Raises:
        PeerLostError: a replica is gone.
    """

    def __init__(self, start: list[Tensor], collective: Collective, graph: Graph) -> None:
        talks = fixed_graph(collective.size, graph)
        self.ranks: list[int] = np.flatnonzero(talks[collective.rank]).tolist()
        """The neighbours."""
        self.values = Values(start)
        self.links = Links(collective, self.values, ((int(asker), int(other)) for asker, other in np.argwhere(talks)))


class Values(PulledValues):
    """Values that move half-way to each neighbour that asks."""

    def __init__(self, values: list[Tensor]) -> None:
        super().__init__(values, 0.5)
        self.num_answered = 0
        """Number of exchanges that neighbours have begun."""
        self._counting = threading.Lock()

    def answer(self, peer: int, tensors: Sequence[Tensor], number: int) -> list[Tensor]:
        with self._counting:
            self.num_answered += 1
        return super().answer(peer, tensors, number)

    def moved(self, moves: Sequence[Tensor], pulls: Sequence[Tensor]) -> list[Tensor]:
        """Add a step's moves to the values, and subtract the pulls of its exchange; return copies of the values."""
        with self._lock, torch.no_grad():
            torch._foreach_add_(self._values, list(moves))
            torch._foreach_sub_(self._values, list(pulls))
            return [value.clone() for value in self._values]
