"""Gossip: after each step a replica mixes its parameters with those of a few others, never with all at once.

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

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.flat_tensors import FlatTensors
from orchestray.trainers.core.exchange import LocalTensor
from orchestray.trainers.layout.tensor_slice import TensorSlice
from orchestray.trainers.sync.common.local_updates import LocalUpdates
from orchestray.trainers.sync.local.mixing import Graph, Kind, Mixer, contraction, expected_rounds, steps_to_reach_all

_LOOK_EVERY_STEPS = 10
_STARTS = 16
"""Number of first steps from which dissemination is measured, on a graph that changes."""


class Gossip(LocalUpdates):
    """Replicas that train alone, and after every step take a weighted mean with a few others.

    The pairs of a step are drawn from seed and step, so that all know them without communication. With `symmetric`
    mixing the weights of a step are doubly stochastic: x_i <- sum_j w_ij x_j keeps the mean. With `push_sum` they are
    only column-stochastic. The replicas mix x_i = w_i z_i, with z_i the model that is trained, and the scalars w_i in
    the same way. All know all w_i, so they are not sent. When the training ends all take the exact mean.

    Args:
        peers: number of others that a replica exchanges with in a step, on the random graph.
        graph: "random", "ring", "complete" or {"edges": pairs of ranks}.
        mixing: "symmetric" or "push_sum".
        seed: seed of the draws.
        consensus_step_size: fraction of the way to the weighted mean taken in a step, above 0, at most 1. None: 1;
            push-sum always uses 1.
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
        """Weight of every replica: its model times the weight is its part of the sum."""
        self._before: list[Tensor] = []
        """Model at the beginning of the step, for push-sum."""
        self._step_size = 1.0 if consensus_step_size is None else consensus_step_size

    def attach(self, model: nn.Module, collective: Collective, pieces: Mapping[str, TensorSlice] | None = None) -> None:
        super().attach(model, collective, pieces)
        self._mixer = Mixer(collective.size, self._graph, self._peers, self._kind, self._seed)
        self._flat = FlatTensors(self._shared)
        self._weights = torch.ones(collective.size, dtype=torch.float64)

    def detach(self) -> None:
        super().detach()
        self._before = []

    def before_step(self, step: int) -> None:
        super().before_step(step)
        self.step_metrics = {}
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
        before = collective.own_bytes_sent
        if sources or targets:
            look = (step - 1) % _LOOK_EVERY_STEPS == 0
            flats = self._parts_of_the_sum()
            received = self.swap(flats, targets, sources, step)
            if look and sources:
                self.step_metrics = {"disagreement": self._estimate(received, sources)}
            pairs = zip(flats, received, strict=True)
            mixed = [mix(flat, by_rank, row, collective.rank, self._step_size) for flat, by_rank in pairs]
            if self._kind == "push_sum":
                torch._foreach_div_(mixed, float(weights[collective.rank]))
            self._flat.unpack(mixed)
        self._count_beyond(collective.own_bytes_sent - before, len(targets), matrix)
        self._weights = weights
        self._before = []

    def _count_beyond(self, sent_bytes: int, num_targets: int, matrix: Tensor) -> None:
        """Count what all replicas sent in a step beyond their number times what this one sent."""
        size, num_messages = len(matrix), int((matrix > 0).sum()) - len(matrix)
        each = sent_bytes // num_targets if num_targets else sum(tensor.nbytes for tensor in self._shared)
        self.bytes_beyond = num_messages * each - size * sent_bytes

    def swap(
        self, flats: Sequence[Tensor], targets: Sequence[int], sources: Sequence[int], step: int
    ) -> list[Mapping[int, Tensor]]:
        """Send the values of `flats` to `targets`, and receive those of `sources`.

        A subclass that sends less than the values overrides this.

        Returns:
            For each flat tensor the values of each rank, this replica's own included.

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
        """Return x_i: the model times its weight, to which the step's move is added unweighted."""
        flats = self._flat.pack()
        if self._before:
            torch._foreach_add_(flats, self._before, alpha=float(self._weights[self.joined().rank]) - 1.0)
        return flats

    def _estimate(self, received: Sequence[Mapping[int, Tensor]], sources: Sequence[int]) -> float:
        """Return an estimate, from this step's partners, of the RMS distance of a replica from the mean of all.

        The mean square distance of two random replicas is 2 P / (P - 1) times its square, by which a partner's is
        divided. The estimate is exact in expectation on the random graph; a ring's neighbours are nearer to each other
        than others.
        """
        rank, size = self.joined().rank, self.joined().size
        weights = self._weights.tolist()
        square = 0.0
        for by_rank in received:
            mine = by_rank[rank] / weights[rank]
            for source in sources:
                square += float((by_rank[source] / weights[source] - mine).double().square().sum())
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
        """Take the mean of all; with push-sum that of the parts of the sum, which the mixing has kept."""
        weight = float(self._weights[self.joined().rank])
        if weight != 1.0:
            torch._foreach_mul_(self._shared, weight)
        super().agree()
        self._weights = torch.ones_like(self._weights)

    def state(self) -> dict[str, LocalTensor]:
        if self._kind == "symmetric":
            return {}
        names = [f"weight.{rank}" for rank in range(len(self._weights))]
        return {name: LocalTensor(self._weights[rank], TensorSlice.whole(name, ())) for rank, name in enumerate(names)}

    def summary(self) -> dict[str, Any]:
        """Return the run's summary of the graph.

        Returns:
            `graph`; `replicas`; `messages_per_step` that a replica sends, on average; `dissemination_steps` until what
            one replica knows has reached all (the mean over the first steps as starts);
            `expected_dissemination_steps`, 1.639 log2 of the replicas; `contraction`, the largest factor by which a
            step multiplies the disagreement, in the root mean square over steps, if mixing is symmetric.
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


def mix(own: Tensor, received: Mapping[int, Tensor], row: Sequence[float], rank: int, step_size: float = 1.0) -> Tensor:
    """Return x_i = own + step_size (sum_j row[j] received[j] - received[rank]), summed in the order of ranks.

    All tensors are flat. If every replica sends its own values, and the step is 1, this is the plain weighted sum.
    Otherwise what a replica has not sent yet stays its own.

    Args:
        own: this replica's values.
        received: values that each rank has sent, this rank's included.
        row: weight of each rank.
        rank: this replica's rank.
        step_size: fraction of the way to the weighted mean.
    """
    first, *others = sorted(received)
    mixed = received[first] * row[first]
    for other in others:
        mixed.add_(received[other], alpha=row[other])
    if received[rank] is own and step_size == 1.0:
        return mixed
    return mixed.sub_(received[rank]).mul_(step_size).add_(own)
