"""CHOCO: gossip whose replicas send, compressed, what has changed since their last message.

Koloskova, Stich and Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed Communication"
(2019): algorithm 2 (CHOCO-SGD), of which algorithm 1 (CHOCO-Gossip) is the part that mixes. Measured on deep networks:
Koloskova, Lin, Stich and Jaggi, "Decentralized Deep Learning with Arbitrary Communication Compression" (2020).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.platform.errors import ConfigError
from orchestray.trainers.core.exchange import LocalTensor
from orchestray.trainers.layout.tensor_slice import TensorSlice
from orchestray.trainers.sync.local.delta_encoding import DifferenceCode, swap_messages
from orchestray.trainers.sync.local.gossip import Gossip
from orchestray.trainers.sync.local.mixing import Graph, Kind

_KEY = "public."


class CompressedGossip(Gossip):
    """A `Gossip` on a fixed graph, whose messages are a replica's difference from its public estimate.

    Each replica i has a public estimate p_i. It and all its neighbours keep a copy of it, the same bits on each:

        q_i = code(x_i - p_i) is sent,    p_j <- p_j + q_j,    x_i <- x_i + step (sum_j w_ij p_j - p_i)

    with j over i and its neighbours. What the replicas add to each other cancels, whatever the code loses, so their
    mean is kept. What it loses stays in x_i - p_i. The estimates begin as what all replicas begin with.

    Args:
        compression: the config's `strategy.compression` section, of any type but `none`, `dgc` and `powersgd`.
        graph: "ring", "complete" or {"edges": pairs of ranks}: the neighbours must stay the same.
        mixing: "symmetric".
        peers: not used.
        seed: seed of the run, for random rounding.
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
        """Estimates of this replica and its neighbours, by rank; flat tensors."""
        self._saved_bytes = 0.0
        """Bytes saved by an average replica: in a graph, replicas may have different numbers of neighbours."""

    def attach(self, model: nn.Module, collective: Collective, pieces: Mapping[str, TensorSlice] | None = None) -> None:
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
        """Send what has changed since the last step; return the estimates, updated by the messages."""
        code, public, collective = self._code, self._known(), self.joined()
        assert code is not None
        message = code.encode(torch._foreach_sub(list(flats), public[collective.rank]), step)
        messages = swap_messages(collective, message, code.message_bytes, targets, sources)
        for rank, received in {**messages, collective.rank: message}.items():
            torch._foreach_add_(public[rank], code.decode(received))
        sent_bytes = message.numel() + (8 if code.message_bytes is None else 0)
        self._saved_bytes += (code.dense_bytes - sent_bytes) * self._mean_degree
        self.bytes_saved = round(self._saved_bytes)
        return [{rank: estimate[index] for rank, estimate in public.items()} for index in range(len(flats))]

    def _known(self) -> dict[int, list[Tensor]]:
        """Return the estimates, made at their first use: a checkpoint may be loaded after `attach`."""
        if not self._public:
            self._public = {rank: self._flat.pack() for rank in (*self._neighbours, self.joined().rank)}
        return self._public

    def state(self) -> dict[str, LocalTensor]:
        """Return this replica's own estimate; its neighbours save theirs."""
        views = self._flat.views(self._known()[self.joined().rank])
        return {
            _KEY + name: LocalTensor(view, self._own[name].piece)
            for name, view in zip(self._names(), views, strict=True)
        }

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load this replica's estimate and send it to the neighbours, uncompressed. All replicas call this."""
        super().load_state(tensors)
        own = self._known()[self.joined().rank]
        for index, flat in enumerate(own):
            received = {peer: self._public[peer][index] for peer in self._neighbours}
            self.joined().start_exchange(dict.fromkeys(self._neighbours, flat), received).wait()

    def summary(self) -> dict[str, Any]:
        """Return the summary of `Gossip` and `consensus_step_size`; `contraction` is that of uncompressed mixing."""
        return {**super().summary(), "consensus_step_size": self._step_size}

    def _names(self) -> list[str]:
        return [name for name, held in self._own.items() if held.tensor.is_floating_point()]


def default_step_size(compression: Mapping[str, Any]) -> float:
    """Return a consensus step that is safe with a code: the more a message loses, the smaller the step.

    Theorem 2 of the paper has a far smaller one for the worst possible code; its authors, too, tune for larger ones.
    With these the disagreement shrinks on rings, stars and complete graphs alike. Twice as large, that of `topk`,
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
