"""Transfer of compressed messages among replicas: all get all messages, or each gets those addressed to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from orchestray.platform.comm.collective import Collective


def gather_messages(collective: Collective, message: Tensor, num_bytes: int | None) -> list[Tensor]:
    """Return every rank's message, in rank order.

    Args:
        collective: the replicas; all call this.
        message: this rank's message, uint8 [bytes].
        num_bytes: length of every rank's message; None if lengths differ, and are sent first, in 8 bytes.
    """
    if num_bytes is not None:
        return list(collective.all_gather(message).unbind(0))
    sizes = collective.all_gather(torch.tensor([message.numel()])).flatten().tolist()
    return trade([message] * collective.size, sizes, collective)


def trade(messages: Sequence[Tensor], sizes: Sequence[int], collective: Collective) -> list[Tensor]:
    """Send a message to each rank and receive one from each; all ranks call this.

    Args:
        messages: one a rank, uint8 [bytes]; the one for this rank stays here.
        sizes: length of the message from each rank.
        collective: the replicas.

    Returns:
        The messages from each rank, in rank order.

    Raises:
        PeerLostError: another replica is gone.
    """
    rank, device = collective.rank, messages[collective.rank].device
    received = [messages[rank] if peer == rank else message_of(size, device) for peer, size in enumerate(sizes)]
    send = {peer: message for peer, message in enumerate(messages) if peer != rank}
    receive = {peer: message for peer, message in enumerate(received) if peer != rank}
    collective.start_exchange(send, receive).wait()
    return received


def message_of(size: int, device: torch.device) -> Tensor:
    """Return memory for a message of that many bytes, on the device of what is made of it."""
    return torch.empty(size, dtype=torch.uint8, device=device)
