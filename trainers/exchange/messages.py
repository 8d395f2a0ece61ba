"""Sending compressed messages among replicas: all get all, or each gets those for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from orchestray.platform.collective import Collective


def gather_messages(collective: Collective, message: Tensor, num_bytes: int | None) -> list[Tensor]:
    """Every rank's message, in rank order.

    Args:
        collective: the replicas; all call.
        message: of this rank, uint8 [bytes].
        num_bytes: the length of every rank's; None: they differ, and are told first, in 8 bytes.
    """
    if num_bytes is not None:
        return list(collective.all_gather(message).unbind(0))
    sizes = collective.all_gather(torch.tensor([message.numel()])).flatten().tolist()
    return trade([message] * collective.size, sizes, collective)


def trade(messages: Sequence[Tensor], sizes: Sequence[int], collective: Collective) -> list[Tensor]:
    """Send a message to each rank and receive one from each; all ranks call.

    Args:
        messages: one a rank, uint8 [bytes]; the one for this rank stays here.
        sizes: how long the message from each rank is.
        collective: the replicas.

    Returns:
        The messages from each rank, in rank order.

    Raises:
        PeerLostError: another replica is gone.
    """
    rank = collective.rank
    received = [messages[rank] if peer == rank else message_of(size) for peer, size in enumerate(sizes)]
    send = {peer: message for peer, message in enumerate(messages) if peer != rank}
    receive = {peer: message for peer, message in enumerate(received) if peer != rank}
    collective.start_exchange(send, receive).wait()
    return received


def message_of(size: int) -> Tensor:
    """Room for a message of so many bytes."""
    return torch.empty(size, dtype=torch.uint8)
