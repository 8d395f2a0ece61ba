"""Synchronous data parallelism by the all-reduces of the survey, instead of the process group's own.

Ben-Nun and Hoefler, "Demystifying Parallel and Distributed Deep Learning" (2019), section 2.5: a tree, a butterfly, a
ring, Rabenseifner's; and the choice among them by message size and number of replicas. All else is `AllReduce`: the
buckets, their order, sending while the backward pass runs. A second thread does the rounds, one bucket after the other,
so that no hook of the backward pass waits for a peer.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from orchestray.platform.comm import objects
from orchestray.platform.comm.allreduce.bounds import no_redundancy_bytes
from orchestray.platform.comm.allreduce.costs import cheapest, costs_s
from orchestray.platform.comm.allreduce.execute import Reducer
from orchestray.platform.comm.allreduce.measure import Fitted, measure
from orchestray.platform.comm.allreduce.placement import order_by_node
from orchestray.platform.comm.allreduce.schedules import ALGORITHMS, num_rounds, sent_elements
from orchestray.platform.comm.collective import Collective
from orchestray.trainers.layout.tensor_slice import TensorSlice
from orchestray.trainers.sync.allreduce.allreduce import AllReduce, FlatBucket

NATIVE = "native"
KNOWN = (*ALGORITHMS, "auto")


class AlgorithmicAllReduce(AllReduce):
    """An all-reduce of the gradients by a schedule; every replica ends a step with the same bits.

    Args:
        algorithm: tree, butterfly, ring or rabenseifner; or "auto": chosen for each bucket by measurements when the
            replicas meet, among these and the process group's own. Two runs may then choose differently, and differ in
            their rounding.
        bucket_mb: size of a bucket, in MiB (see `AllReduce`).
        overlap: True to send during the backward pass (see `AllReduce`).
        node: node of this replica; replicas of one node get neighbouring places in the schedule. None: the host name.
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
        """Algorithm for a bucket, by its number of bytes."""
        self._order: list[int] = [0]
        self._beyond: dict[int, int] = {}
        """Bytes that all send for a bucket beyond their number times what this one sends, by its number of bytes: the
        ranks of a tree do not all send the same.
        """
        self._most_sent: dict[int, int] = {}
        """Bytes that the busiest replica sends for a bucket, by its number of bytes."""

    def attach(self, model: nn.Module, collective: Collective, pieces: Mapping[str, TensorSlice] | None = None) -> None:
        super().attach(model, collective, pieces)
        self._buckets_bytes, self._chosen, self._beyond, self._most_sent = [], {}, {}, {}
        if self._filling is None:
            return
        own = collective.sibling("schedules")  # a thread sends through it, while the replica sends through its own
        self._order = order_by_node(objects.gather_json(collective, self._node))
        self._reducer = Reducer(own, self._order)
        self._fitted = measure(own) if self._algorithm == "auto" else None
        for bucket in self._filling.buckets:
            self._plan(bucket.flat)

    def detach(self) -> None:
        super().detach()
        self._reducer = None

    def before_step(self, step: int) -> None:
        super().before_step(step)
        self.bytes_beyond = 0

    def summary(self) -> dict[str, Any]:
        """Return the run's summary of the exchange, as JSON values.

        `algorithm` as configured; `order`, the ranks by place; a list `buckets` with `num_bytes`, `algorithm` and
        `rounds` (null for the process group's own) of each. `sent_bytes` of a bucket are those of the busiest replica,
        null likewise; it must send `least_bytes` if no addition is repeated. With "auto" also `alpha_s` and
        `beta_s_per_byte` of a message, `native_alpha_s` and `native_beta_s_per_byte` of a whole native all-reduce, and
        for each bucket `expected_s` of every algorithm. `held_out` lists messages that the fit has not seen, with
        `num_bytes`, `expected_s` and `measured_s`, and `error`, the one over the other less 1.
        """
        buckets: list[dict[str, Any]] = []
        size = len(self._order)
        for num_bytes in self._buckets_bytes:
            chosen = self._chosen[num_bytes]
            rounds = None if chosen == NATIVE else num_rounds(chosen, size)
            sent = self._most_sent.get(num_bytes)
            least = no_redundancy_bytes(size, num_bytes)
            buckets.append({"num_bytes": num_bytes, "algorithm": chosen, "rounds": rounds})
            buckets[-1] |= {"sent_bytes": sent, "least_bytes": least}
            if self._fitted is not None:
                buckets[-1]["expected_s"] = self._expected_s(num_bytes)
        summary: dict[str, Any] = {"algorithm": self._algorithm, "order": list(self._order), "buckets": buckets}
        if self._fitted is not None:
            message, native = self._fitted.message, self._fitted.native
            summary |= {"alpha_s": message.alpha_s, "beta_s_per_byte": message.beta_s_per_byte}
            summary |= {"native_alpha_s": native.alpha_s, "native_beta_s_per_byte": native.beta_s_per_byte}
            summary["held_out"] = [
                {
                    "num_bytes": num_bytes,
                    "expected_s": message.time_s(num_bytes),
                    "measured_s": measured_s,
                    "error": message.time_s(num_bytes) / measured_s - 1,
                }
                for num_bytes, measured_s in self._fitted.held_out_s.items()
            ]
        return summary

    def _expected_s(self, num_bytes: int) -> dict[str, float]:
        assert self._fitted is not None
        return costs_s(len(self._order), num_bytes, self._fitted.message, {NATIVE: self._fitted.native})

    def _send(self, bucket: FlatBucket) -> None:
        num_bytes = bucket.flat.nbytes
        algorithm = self._chosen[num_bytes]
        if algorithm == NATIVE:
            super()._send(bucket)
            return
        assert self._reducer is not None
        self.bytes_beyond += self._beyond[num_bytes]
        bucket.pending = self._reducer.start(bucket.flat, algorithm)

    def _plan(self, flat: Tensor) -> None:
        """Choose the algorithm for a tensor of this size, and count the bytes that it sends."""
        num_bytes = flat.nbytes
        self._buckets_bytes.append(num_bytes)
        chosen = self._algorithm if self._fitted is None else cheapest(self._expected_s(num_bytes))
        self._chosen[num_bytes] = chosen
        if chosen != NATIVE:
            size, place = len(self._order), self._order.index(self.joined().rank)
            sent = [n * flat.element_size() for n in sent_elements(chosen, size, flat.numel())]
            self._beyond[num_bytes] = sum(sent) - size * sent[place]
            self._most_sent[num_bytes] = max(sent)
