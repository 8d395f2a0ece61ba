"""Compressed differences: what tensors have moved away from what the receivers know of them.

What a message loses is not kept separately: it is a part of the next difference, because the sender, too, counts only
what its message contained as known. That is error feedback without a residual (Koloskova, Stich and Jaggi,
"Decentralized Stochastic Optimization and Gossip Algorithms with Compressed Communication", 2019, section 3.4). A
residual in addition would count every loss twice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.flat_tensors import FlatTensors
from orchestray.trainers.compression.base import as_bytes, from_bytes
from orchestray.trainers.compression.registry import make_compressor
from orchestray.trainers.sync.common.messages import message_of


class DifferenceCode:
    """An encoder and decoder of differences of flat tensors, each tensor in them by itself; it has no memory.

    Args:
        compression: the config's `strategy.compression` section, of any type but `none`, `dgc` and `powersgd`. Its
            `error_feedback` is ignored: a message always comes as near to its value as its code can, so that it never
            loses more than there was (the contraction of assumption 1 of the paper).
        flat: layout of the tensors in the flat ones.
        seed: seed of the run, for random rounding.
        worker: index of the sender, from 0.
        num_workers: number of senders.
        exact: indices of the tensors that are sent uncompressed, after the code of the others.
    """

    def __init__(
        self,
        compression: Mapping[str, Any],
        flat: FlatTensors,
        *,
        seed: int,
        worker: int,
        num_workers: int,
        exact: Collection[int] = (),
    ) -> None:
        chosen = {**compression, "error_feedback": True}
        self._compressor = make_compressor(**chosen, seed=seed, worker=worker, num_workers=num_workers)
        self._flat = flat
        like = flat.views(flat.pack())
        self._coded = [index for index in range(len(like)) if index not in exact]
        self._exact = {index: torch.empty_like(like[index], device="meta") for index in sorted(exact)}
        self._exact_bytes = [tensor.nbytes for tensor in self._exact.values()]
        self._compressor.init([like[index] for index in self._coded])

    def encode(self, differences: Sequence[Tensor], step: int) -> Tensor:
        """Return the message, uint8 [bytes], of flat tensors; the same step draws the same random numbers."""
        self._compressor.state()["residual"].zero_()
        views = self._flat.views(differences)
        message = self._compressor.compress([views[index] for index in self._coded], step=step)
        exact = [as_bytes(views[index]) for index in self._exact]
        return torch.cat([message, *exact]) if exact else message

    def decode(self, message: Tensor) -> list[Tensor]:
        """Decode a message of any sender into flat tensors, the same bits everywhere."""
        coded, *exact = torch.split(message, [message.numel() - sum(self._exact_bytes), *self._exact_bytes])
        tensors = dict(zip(self._coded, self._compressor.decompress(coded), strict=True))
        for (index, like), part in zip(self._exact.items(), exact, strict=True):
            tensors[index] = from_bytes(part, like.dtype).view(like.shape)
        return self._flat.pack_these([tensors[index] for index in range(len(tensors))])

    @property
    def message_bytes(self) -> int | None:
        """Length of every message in bytes; None if it differs from one to the next."""
        coded = self._compressor.message_bytes
        return None if coded is None else coded + sum(self._exact_bytes)

    @property
    def dense_bytes(self) -> int:
        """Length of the uncompressed tensors in bytes."""
        return self._compressor.dense_bytes + sum(self._exact_bytes)


def swap_messages(
    collective: Collective, message: Tensor, num_bytes: int | None, targets: Sequence[int], sources: Sequence[int]
) -> dict[int, Tensor]:
    """Send a message to each of `targets`, and receive one from each of `sources`; they call this at the same time.

    Args:
        collective: the replicas.
        message: this replica's message, uint8 [bytes].
        num_bytes: length of every replica's message; None if lengths differ, and are sent first, in 8 bytes.
        targets: ranks, without this one's.
        sources: ranks, without this one's.

    Returns:
        The messages received, by rank.

    Raises:
        PeerLostError: one of them is gone.
    """
    lengths = dict.fromkeys(sources, message.numel() if num_bytes is None else num_bytes)
    if num_bytes is None:
        own = message.new_tensor([message.numel()], dtype=torch.int64)
        sizes = {source: own.clone() for source in sources}
        collective.start_exchange(dict.fromkeys(targets, own), sizes).wait()
        lengths = {source: int(length) for source, length in sizes.items()}
    received = {source: message_of(length, message.device) for source, length in lengths.items()}
    collective.start_exchange(dict.fromkeys(targets, message.contiguous()), received).wait()
    return received
