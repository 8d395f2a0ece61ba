"""Synchronous data parallelism by the all-reduces of the survey, in place of the process group's own.

Ben-Nun and Hoefler, "Demystifying Parallel and Distributed Deep Learning" (2019), section 2.5: a tree, a butterfly, a
ring, Rabenseifner's; and the choice among them by the size of what is sent and the number of replicas. All else is
`AllReduce`: the buckets, the order in which they are sent, sending while the backward pass runs. A thread beside it
does the rounds, one bucket after the other, so that no hook of the backward pass waits for a peer.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from orchestray.platform.collective import Collective, Pending
from orchestray.platform.collectives.costs import cheapest, costs_s
from orchestray.platform.collectives.execute import Reducer
from orchestray.platform.collectives.measure import Fitted, measure
from orchestray.platform.collectives.placement import order_by_node
from orchestray.platform.collectives.schedules import ALGORITHMS, num_rounds, sent_elements
from orchestray.trainers.exchange.allreduce import AllReduce
from orchestray.trainers.layout.pieces import Piece
from orchestray.trainers.replica import agreement

NATIVE = "native"
KNOWN = (*ALGORITHMS, "auto")


class AlgorithmicAllReduce(AllReduce):
    """All-reduce of the gradients by a schedule; every replica ends a step with the same bits.

    Args:
        algorithm: tree, butterfly, ring or rabenseifner; "auto": measured when the replicas meet, and chosen for each
            bucket, the process group's own being one of them. Two runs may then choose differently, and differ by
            roundings.
        bucket_mb: as `AllReduce`'s.
        overlap: as `AllReduce`'s.
        node: where this replica runs; those of one node take neighbouring places in the schedule.
    """

    def __init__(
        self, algorithm: str, bucket_mb: float = 25.0, overlap: bool = True, *, node: str | None = None
    ) -> None:
        super().__init__(bucket_mb, overlap)
        self._algorithm = algorithm
        self._node = socket.gethostname() if node is None else node
        self._reducer: Reducer | None = None
        self._fitted: Fitted | None = None
        self._buckets_bytes: list[int] = []
        self._chosen: dict[int, str] = {}
        """The algorithm for a bucket, by its number of bytes."""
        self._order: list[int] = [0]
        self._sent: dict[int, tuple[int, int]] = {}
        """For a bucket of so many bytes: what this replica sends, and what all send beyond as many times that."""
        self._bytes_beyond = 0

    def attach(self, model: nn.Module, collective: Collective, pieces: Mapping[str, Piece] | None = None) -> None:
        super().attach(model, collective, pieces)
        self._buckets_bytes, self._chosen, self._sent, self._bytes_beyond = [], {}, {}, 0
        if self._filling is None:
            return
        own = collective.sibling("schedules")  # a thread sends through it, beside what the replica sends meanwhile
        self._order = order_by_node(agreement.gather_json(collective, self._node))
        self._reducer = Reducer(own, self._order)
        self._fitted = measure(own) if self._algorithm == "auto" else None
        for bucket in self._filling.buckets:
            self._plan(bucket.flat)

    def detach(self) -> None:
        super().detach()
        self._reducer = None

    def before_step(self, step: int) -> None:
        super().before_step(step)
        self._bytes_beyond = 0

    @property
    def bytes_beyond(self) -> int:
        """What all replicas have sent in this step beyond the number of replicas times what this one has: the ranks of
        a tree do not all send the same.
        """
        return self._bytes_beyond

    def told(self) -> dict[str, Any]:
        """What the run says of it. JSON values only.

        `algorithm` as configured; `order`, the ranks by place; a list `buckets` with `num_bytes`, `algorithm` and
        `rounds` (null for the process group's own) of each; with "auto" also `alpha_s` and `beta_s_per_byte` of a
        message, `native_alpha_s` and `native_beta_s_per_byte` of a whole native all-reduce, and for each bucket
        `expected_s` of every algorithm.
        """
        buckets: list[dict[str, Any]] = []
        size = len(self._order)
        for num_bytes in self._buckets_bytes:
            chosen = self._chosen[num_bytes]
            rounds = None if chosen == NATIVE else num_rounds(chosen, size)
            buckets.append({"num_bytes": num_bytes, "algorithm": chosen, "rounds": rounds})
            if self._fitted is not None:
                buckets[-1]["expected_s"] = self._expected_s(num_bytes)
        told: dict[str, Any] = {"algorithm": self._algorithm, "order": list(self._order), "buckets": buckets}
        if self._fitted is not None:
            message, native = self._fitted.message, self._fitted.native
            told |= {"alpha_s": message.alpha_s, "beta_s_per_byte": message.beta_s_per_byte}
            told |= {"native_alpha_s": native.alpha_s, "native_beta_s_per_byte": native.beta_s_per_byte}
        return told

    def _expected_s(self, num_bytes: int) -> dict[str, float]:
        assert self._fitted is not None
        return costs_s(len(self._order), num_bytes, self._fitted.message, {NATIVE: self._fitted.native})

    def _start_sum(self, flat: Tensor) -> tuple[Pending, int]:
        algorithm = self._chosen[flat.nbytes]
        if algorithm == NATIVE:
            return super()._start_sum(flat)
        assert self._reducer is not None
        mine, beyond = self._sent[flat.nbytes]
        self._bytes_beyond += beyond
        return self._reducer.start(flat, algorithm), mine

    def _plan(self, flat: Tensor) -> None:
        """Choose how a tensor of this size is summed, and count what that sends."""
        num_bytes = flat.nbytes
        self._buckets_bytes.append(num_bytes)
        chosen = self._algorithm if self._fitted is None else cheapest(self._expected_s(num_bytes))
        self._chosen[num_bytes] = chosen
        if chosen != NATIVE:
            size, place = len(self._order), self._order.index(self._joined().rank)
            sent = [n * flat.element_size() for n in sent_elements(chosen, size, flat.numel())]
            self._sent[num_bytes] = (sent[place], sum(sent) - size * sent[place])
