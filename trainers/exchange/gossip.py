"""Gossip: after each step a replica mixes its parameters with those of a few others; nobody asks all.

Random partners: Jin et al., "How to Scale Distributed Deep Learning?" (2016), gossiping SGD; Daily et al., "GossipGraD"
(2018). A fixed graph: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?" (2017), algorithm
1 (D-PSGD). Push-sum: Assran et al., "Stochastic Gradient Push for Distributed Deep Learning" (2019), algorithm 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from orchestray.platform.collective import Collective
from orchestray.trainers.exchange.base import Held
from orchestray.trainers.exchange.dissemination import expected_rounds
from orchestray.trainers.exchange.diverging import Diverging
from orchestray.trainers.exchange.flat import FlatTensors
from orchestray.trainers.exchange.mixing import Graph, Kind, Mixer, contraction, steps_to_reach_all
from orchestray.trainers.layout.pieces import Piece

_LOOK_EVERY_STEPS = 10
_STARTS = 16
"""Steps from which dissemination is counted, on a graph that changes."""


class Gossip(Diverging):
    """Each replica trains alone, and after every step takes a weighted mean with a few others.

    Who talks to whom is drawn from seed and step, so that all know it without a word. With `symmetric` mixing the
    weights of a step are doubly stochastic: x_i <- sum_j w_ij x_j keeps the mean. With `push_sum` they are only
    column-stochastic: the replicas mix x_i = w_i z_i, z_i being the model that is trained, and the scalars w_i, which
    are mixed alike; all know all of them, so they are not sent. When the training ends all take the exact mean.

    Args:
        peers: others that a replica talks to in a step, on the random graph.
        graph: "random", "ring", "complete" or {"edges": pairs of ranks}.
        mixing: "symmetric" or "push_sum".
        seed: of the draws.
        consensus_step_size: part of the way to the weighted mean that is gone in a step, above 0, at most 1; None: all
            of it. With push-sum there is no part of it.
    """

    def __init__(
        self,
        peers: int = 1,
        graph: Graph = "random",
        mixing: Kind = "symmetric",
        seed: int = 0,
        consensus_step_size: float | None = None,
    ) -> None:
        super().__init__()
        self._peers = peers
        self._graph = graph
        self._kind = mixing
        self._seed = seed
        self._mixer = Mixer(1)
        self._flat = FlatTensors([])
        self._weights = torch.ones(1, dtype=torch.float64)
        """Of every replica: what its model must be multiplied by to get its part of the sum."""
        self._before: list[Tensor] = []
        """Push-sum: the model at the beginning of the step."""
        self._disagreement: float | None = None
        self._step_size = 1.0 if consensus_step_size is None else consensus_step_size

    def attach(self, model: nn.Module, collective: Collective, pieces: Mapping[str, Piece] | None = None) -> None:
        super().attach(model, collective, pieces)
        self._mixer = Mixer(collective.size, self._graph, self._peers, self._kind, self._seed)
        self._flat = FlatTensors(self._shared)
        self._weights = torch.ones(collective.size, dtype=torch.float64)

    def detach(self) -> None:
        super().detach()
        self._before = []

    def before_step(self, step: int) -> None:
        super().before_step(step)
        self._disagreement = None
        if float(self._weights[self.joined().rank]) != 1.0:
            self._before = self._flat.pack()

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        collective = self.joined()
        matrix = torch.from_numpy(self._mixer.matrix(step))
        row, column = matrix[collective.rank].tolist(), matrix[:, collective.rank].tolist()
        sources = [rank for rank, weight in enumerate(row) if weight > 0 and rank != collective.rank]
        targets = [rank for rank, weight in enumerate(column) if weight > 0 and rank != collective.rank]
        weights = matrix @ self._weights if self._kind == "push_sum" else self._weights
        if sources or targets:
            look = (step - 1) % _LOOK_EVERY_STEPS == 0
            flats = self._parts_of_the_sum()
            said = self.swap(flats, targets, sources, step)
            if look and sources:
                self._disagreement = self._estimate(said, sources)
            pairs = zip(flats, said, strict=True)
            mixed = [mix(flat, words, row, collective.rank, self._step_size) for flat, words in pairs]
            if self._kind == "push_sum":
                torch._foreach_div_(mixed, float(weights[collective.rank]))
            self._flat.unpack(mixed)
        self._weights = weights
        self._before = []

    def swap(
        self, flats: Sequence[Tensor], targets: Sequence[int], sources: Sequence[int], step: int
    ) -> list[Mapping[int, Tensor]]:
        """Tell `targets` the values of `flats`, and learn those of `sources`: for each flat tensor what each has told
        of itself, by rank, this replica's own word among them. Whoever sends less than the values does so here.

        Raises:
            PeerLostError: one of them is gone.
        """
        return [self._swapped(flat, targets, sources) for flat in flats]

    def _swapped(self, flat: Tensor, targets: Sequence[int], sources: Sequence[int]) -> dict[int, Tensor]:
        collective = self.joined()
        received = {source: torch.empty_like(flat) for source in sources}
        collective.start_exchange(dict.fromkeys(targets, flat), received).wait()
        return {**received, collective.rank: flat}

    def _parts_of_the_sum(self) -> list[Tensor]:
        """x_i: the model times its weight; but the step's move is added as it is, not times the weight."""
        flats = self._flat.pack()
        if self._before:
            torch._foreach_add_(flats, self._before, alpha=float(self._weights[self.joined().rank]) - 1.0)
        return flats

    def _estimate(self, said: Sequence[Mapping[int, Tensor]], sources: Sequence[int]) -> float:
        """Root of the mean square distance of a replica from the mean of all, as this step's partners let one guess.

        The mean square distance of two replicas drawn at random is 2 P / (P - 1) times it, so that many a partner's is
        divided by. Exact in expectation on the random graph; a ring's neighbours are nearer to each other than others.
        """
        rank, size = self.joined().rank, self.joined().size
        weights = self._weights.tolist()
        square = 0.0
        for words in said:
            mine = words[rank] / weights[rank]
            for source in sources:
                square += float((words[source] / weights[source] - mine).double().square().sum())
        return float((square / len(sources) * (size - 1) / (2 * size)) ** 0.5)

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        weights = self._weights
        try:
            with super().consensus():
                yield
        finally:
            self._weights = weights

    @torch.no_grad()
    def agree(self) -> None:
        """Take the mean of all; with push-sum that of the parts of the sum, which is what the mixing has kept."""
        weight = float(self._weights[self.joined().rank])
        if weight != 1.0:
            torch._foreach_mul_(self._shared, weight)
        super().agree()
        self._weights = torch.ones_like(self._weights)

    def state(self) -> dict[str, Held]:
        if self._kind == "symmetric":
            return {}
        names = [f"weight.{rank}" for rank in range(len(self._weights))]
        return {name: Held(self._weights[rank], Piece.whole(name, ())) for rank, name in enumerate(names)}

    def report(self) -> dict[str, float]:
        """`disagreement`, every tenth step: see `_estimate`; of the part of the model that this worker holds."""
        return {} if self._disagreement is None else {"disagreement": self._disagreement}

    def told(self) -> dict[str, Any]:
        """What the result says of the graph.

        Returns:
            `graph`; `replicas`; `messages_per_step` that a replica sends, on average; `dissemination_steps` until what
            one replica knows has reached all (the mean over the first steps as starts), against
            `expected_dissemination_steps`, 1.639 log2 of the replicas; `contraction`: what a step
            multiplies the disagreement by at most, in the root mean square over steps, where mixing is symmetric.
        """
        mixer, size = self._mixer, self._mixer.size
        starts = range(1, (_STARTS if mixer.name == "random" else 1) + 1)
        matrices = [mixer.matrix(step) for step in starts]
        steps = [steps_to_reach_all(mixer.matrix, size, first_step=step) for step in starts]
        return {
            "graph": mixer.name,
            "replicas": size,
            "messages_per_step": sum(int((matrix > 0).sum()) - size for matrix in matrices) / len(matrices) / size,
            "dissemination_steps": sum(steps) / len(steps),
            "expected_dissemination_steps": expected_rounds(size),
            "contraction": contraction(matrices) if self._kind == "symmetric" else None,
        }


def mix(own: Tensor, said: Mapping[int, Tensor], row: Sequence[float], rank: int, step_size: float = 1.0) -> Tensor:
    """The step x_i <- own + step_size (sum_j row[j] said[j] - said[rank]), in the order of ranks; flat tensors.

    Where everybody says what it has, and the step is whole, that is the plain weighted sum; where it does not, what is
    not said yet stays its own.
    """
    first, *others = sorted(said)
    mixed = said[first] * row[first]
    for other in others:
        mixed.add_(said[other], alpha=row[other])
    if said[rank] is own and step_size == 1.0:
        return mixed
    return mixed.sub_(said[rank]).mul_(step_size).add_(own)
