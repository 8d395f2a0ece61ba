"""A key-value store whose shards the replicas themselves host, each beside its training.

Poseidon (Zhang et al., USENIX ATC 2017, sections 3 and 4) has a sharded parameter server on the nodes of its workers:
a worker pushes each part of its gradient to the shard that owns it, and pulls from there what all have pushed.
Here a shard answers with the sum of the gradients, as MXNet's store does if it does not update: every replica keeps the
weights and the optimizer, so a checkpoint is one of whole weights, and a lost shard is a lost replica.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orchestray.platform.comm.collective import Collective
from orchestray.platform.data.even_split import split_evenly


def factors_per_node(num_rows: int, in_features: int, out_features: int, num_workers: int) -> int:
    """Return the values a node sends and receives if all broadcast factors: 2 K (P1 - 1) (M + N) (table 1).

    Args:
        num_rows: K, samples of a worker.
        in_features: N.
        out_features: M.
        num_workers: P1.
    """
    return 2 * num_rows * (num_workers - 1) * (in_features + out_features)


def store_per_node(in_features: int, out_features: int, num_workers: int, num_shards: int) -> float:
    """Return the values a worker with a shard beside it sends and receives: 2 M N (P1 + P2 - 2) / P2 (table 1).

    Args:
        in_features: N.
        out_features: M.
        num_workers: P1.
        num_shards: P2.
    """
    return 2 * in_features * out_features * (num_workers + num_shards - 2) / num_shards


class ColocatedStore:
    """Shards of a key-value store, of which each of the first ranks hosts one; a key is an even part of a tensor.

    Args:
        collective: the replicas, all of which push and pull, in the same order.
        num_shards: number of shards, at most the number of replicas.

    Raises:
        ValueError: there are fewer replicas than shards, or no shard.
    """

    def __init__(self, collective: Collective, num_shards: int) -> None:
        if not 1 <= num_shards <= collective.size:
            raise ValueError(f"Expected 1 to {collective.size} shards among {collective.size} replicas: {num_shards}.")
        self._collective = collective
        self.num_shards = num_shards

    def push(self, values: Tensor) -> Tensor:
        """Send each part of `values` to its shard; return the sum of this rank's shard, empty if it hosts none.

        The sum is in rank order, so it does not depend on which push arrives first.

        Args:
            values: this replica's contribution, `[n]`.

        Raises:
            PeerLostError: another replica, and its shard, is gone.
        """
        rank, size = self._collective.rank, self._collective.size
        parts = self._parts(values)
        own = parts[rank] if rank < self.num_shards else values[:0]
        pushed = [own if peer == rank else torch.empty_like(own) for peer in range(size)]
        send = {owner: part for owner, part in enumerate(parts) if owner != rank}
        receive = {peer: part for peer, part in enumerate(pushed) if peer != rank and own.numel()}
        self._collective.start_exchange(send, receive).wait()
        total = pushed[0].clone()
        for part in pushed[1:]:
            total += part
        return total

    def pull(self, total: Tensor, into: Tensor) -> None:
        """Overwrite `into`, `[n]`, by the shards' sums; this rank's shard sends `total` to all others.

        Raises:
            PeerLostError: another replica, and its shard, is gone.
        """
        rank, size = self._collective.rank, self._collective.size
        parts = self._parts(into)
        send = {peer: total for peer in range(size) if peer != rank and total.numel()}
        receive = {owner: part for owner, part in enumerate(parts) if owner != rank}
        self._collective.start_exchange(send, receive).wait()
        if rank < self.num_shards:
            parts[rank].copy_(total)

    def own_bytes(self, values: Tensor) -> int:
        """Return the bytes this rank sends to sum `values`: pushes to the other shards, and its sum to the others."""
        rank, parts = self._collective.rank, self._parts(values)
        own = parts[rank].nbytes if rank < self.num_shards else 0
        return values.nbytes - own + (self._collective.size - 1) * own

    def _parts(self, values: Tensor) -> list[Tensor]:
        return [values[first:last] for first, last in split_evenly(values.numel(), self.num_shards)]
