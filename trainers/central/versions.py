"""Versions of a shard's values that workers of the server's machine read where they are, without a copy.

A worker is lent the values as they are. From then on they stay as they are: the next update is written to other memory,
which is the next version. Memory comes back when the worker says that it stands on a newer version, and is used again.
So there are at most three versions more than there are workers that read.

No worker can change them: a model that writes to its parameters writes to a copy of the pages it touches.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from orchestray.platform.channel.blocks import SharedBlock, room_for

if TYPE_CHECKING:
    from torch import Tensor

    from orchestray.platform.channel.base import Channel
    from orchestray.platform.channel.blocks import Place
    from orchestray.trainers.central.shard import Shard


class Versions:
    """Who reads which version of a shard. Used while the server is locked, but for `show`."""

    def __init__(self, shard: Shard) -> None:
        """Nothing is lent yet."""
        self._shard = shard
        self._blocks: dict[int, SharedBlock] = {}
        """By the address of the tensor that fills it."""
        self._read: dict[Channel, deque[tuple[int, Tensor]]] = {}
        """What each worker was lent and may still read, with its version, the oldest first."""
        self._abandoned: list[Tensor] = []
        """Lent for ever."""

    def lend(self, channel: Channel) -> Tensor:
        """The values as they are, for the worker at the other end: memory to `show` it."""
        shard = self._shard
        if shard.values.data_ptr() not in self._blocks:
            shard.live_in(self._take)
        values = shard.lend()
        self._read.setdefault(channel, deque()).append((shard.version, values))
        return values

    def settle(self, channel: Channel, version: int) -> None:
        """A worker stands on this version: it reads no older one."""
        read = self._read.get(channel, deque())
        while read and read[0][0] < version:
            self._shard.give_back(read.popleft()[1])

    def end(self, channel: Channel, *, reads_on: bool) -> None:
        """A channel has ended.

        Args:
            channel: which.
            reads_on: whether the worker may go on computing with what it was lent: then that memory is not used again.
        """
        for _, values in self._read.pop(channel, ()):
            if reads_on:
                self._abandoned.append(values)
            else:
                self._shard.give_back(values)

    def show(self, channel: Channel, values: Tensor) -> Place:
        """Where a worker finds what it was lent; by the thread that answers it, not locked."""
        place = channel.lend(values)
        if place is None:
            channel.offer(self._blocks[values.data_ptr()])
            place = channel.lend(values)
        assert place is not None
        return place

    def _take(self, like: Tensor) -> Tensor:
        block = SharedBlock.create(room_for([like]), is_mine=True)
        made = block.take(like)
        self._blocks[made.data_ptr()] = block
        return made
