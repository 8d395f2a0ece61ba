"""CHOCO: gossip whose replicas send what has changed since they last spoke, in a code.

Koloskova, Stich and Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed Communication"
(2019): algorithm 2 (CHOCO-SGD), of which algorithm 1 (CHOCO-Gossip) is the part that mixes. Measured on deep networks:
Koloskova, Lin, Stich and Jaggi, "Decentralized Deep Learning with Arbitrary Communication Compression" (2020).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from orchestray.platform.collective import Collective
from orchestray.platform.errors import ConfigError
from orchestray.trainers.exchange.base import Held
from orchestray.trainers.exchange.differences import DifferenceCode, swap_messages
from orchestray.trainers.exchange.gossip import Gossip
from orchestray.trainers.exchange.mixing import Graph, Kind
from orchestray.trainers.layout.pieces import Piece

_KEY = "public."


class CompressedGossip(Gossip):
    """As `Gossip` on a graph that stays, with messages that say what a replica differs by from what they said before.

    Each replica i has a public estimate p_i, which it and all its neighbours keep a copy of, the same bits on each:

        q_i = code(x_i - p_i) is sent,    p_j <- p_j + q_j,    x_i <- x_i + step (sum_j w_ij p_j - p_i)

    with j over i and its neighbours. What the replicas add to each other cancels, whatever the code loses, so their
    mean is kept; what it loses stays in x_i - p_i. The estimates begin as what all replicas begin with.

    Args:
        compression: the config's `strategy.compression` section, of any type but `none`, `dgc` and `powersgd`.
        graph: "ring", "complete" or {"edges": pairs of ranks}: the neighbours must stay the same.
        mixing: "symmetric".
        peers: of no use here.
        seed: of the run, for random rounding.
        consensus_step_size: the step; None: see `default_step_size`.

    Raises:
        ConfigError: the graph is random, or mixing is push_sum.
    """

    def __init__(
        self,
        compression: Mapping[str, Any],
        graph: Graph = "ring",
        mixing: Kind = "symmetric",
        peers: int = 1,
        seed: int = 0,
        consensus_step_size: float | None = None,
    ) -> None:
        if graph == "random" or mixing != "symmetric":
            text = "compressed gossip needs neighbours that stay the same, both ways"
            raise ConfigError(f"strategy.exchange.graph: {text}; use graph: ring or complete, and mixing: symmetric.")
        step_size = default_step_size(compression) if consensus_step_size is None else consensus_step_size
        super().__init__(peers, graph, mixing, seed, step_size)
        self._compression = dict(compression)
        self._code: DifferenceCode | None = None
        self._neighbours: list[int] = []
        self._public: dict[int, list[Tensor]] = {}
        """The estimates of this replica and its neighbours, by rank; flat tensors."""
        self._saved_bytes = 0.0
        """By an average replica: those of a graph need not have as many neighbours each."""

    def attach(self, model: nn.Module, collective: Collective, pieces: Mapping[str, Piece] | None = None) -> None:
        super().attach(model, collective, pieces)
        rank, size = collective.rank, collective.size
        talks = self._mixer.matrix(1) > 0
        self._neighbours = [peer for peer in range(size) if talks[rank, peer] and peer != rank]
        self._mean_degree = float(talks.sum() - size) / size
        self._code = DifferenceCode(
            self._compression, self._flat, seed=self._seed, worker=rank, num_workers=size, exact=self._statistics
        )
        self._public = {}

    def detach(self) -> None:
        super().detach()
        self._code, self._public = None, {}

    def before_step(self, step: int) -> None:
        super().before_step(step)
        self._known()

    def swap(
        self, flats: Sequence[Tensor], targets: Sequence[int], sources: Sequence[int], step: int
    ) -> list[Mapping[int, Tensor]]:
        """Tell what has changed since the last step; returns the estimates, which that has brought up to date."""
        code, public, collective = self._code, self._known(), self.joined()
        assert code is not None
        message = code.encode(torch._foreach_sub(list(flats), public[collective.rank]), step)
        messages = swap_messages(collective, message, code.message_bytes, targets, sources)
        for rank, said in {**messages, collective.rank: message}.items():
            torch._foreach_add_(public[rank], code.decode(said))
        told_bytes = message.numel() + (8 if code.message_bytes is None else 0)
        self._saved_bytes += (code.dense_bytes - told_bytes) * self._mean_degree
        return [{rank: estimate[index] for rank, estimate in public.items()} for index in range(len(flats))]

    def _known(self) -> dict[int, list[Tensor]]:
        """The estimates; not when attached: a checkpoint may have been loaded since."""
        if not self._public:
            self._public = {rank: self._flat.pack() for rank in (*self._neighbours, self.joined().rank)}
        return self._public

    def state(self) -> dict[str, Held]:
        """This replica's own estimate; its neighbours save theirs."""
        views = self._flat.views(self._known()[self.joined().rank])
        return {_KEY + name: Held(view, self._own[name].piece) for name, view in zip(self._names(), views, strict=True)}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """All replicas call: they tell their neighbours, uncompressed."""
        super().load_state(tensors)
        own = self._known()[self.joined().rank]
        for index, flat in enumerate(own):
            said = {peer: self._public[peer][index] for peer in self._neighbours}
            self.joined().start_exchange(dict.fromkeys(self._neighbours, flat), said).wait()

    def told(self) -> dict[str, Any]:
        """As `Gossip`, and `consensus_step_size`; `contraction` is that of uncompressed mixing."""
        return {**super().told(), "consensus_step_size": self._step_size}

    @property
    def bytes_dense_total(self) -> int:
        return self.bytes_sent_total + round(self._saved_bytes)

    def _names(self) -> list[str]:
        return [name for name, held in self._own.items() if held.tensor.is_floating_point()]


def default_step_size(compression: Mapping[str, Any]) -> float:
    """A consensus step that is safe with a code: the more a message loses, the less its word is worth.

    Theorem 2 of the paper has a far smaller one for the worst code there could be; its authors, too, try for better
    ones. By these the disagreement shrinks on rings, stars and complete graphs alike; twice as large, that of `topk`,
    `terngrad` and `onebit` grows on some.

    Args:
        compression: the `strategy.compression` section.
    """
    kind = compression["type"]
    if kind in ("topk", "adaptive_threshold"):
        return min(1.0, 2.0 * float(compression.get("ratio", 0.01)))
    if kind == "qsgd":
        return {2: 0.2, 3: 0.5}.get(int(compression.get("bits", 4)), 1.0)
    return {"float16": 1.0, "bfloat16": 1.0, "terngrad": 0.3, "onebit": 0.3}.get(kind, 0.02)
