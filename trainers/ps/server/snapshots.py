"""Versions of a shard's values that workers on the server's machine read in place, without a copy.

A worker is lent the present values, which then stay unchanged: the next update is written to other memory, as the next
version. The memory comes back when the worker reports that it reads a newer version, and is used again. So there
are at most three versions more than there are workers that read.

No worker can change the values: a model that writes to its parameters writes to a copy of the pages it touches.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from orchestray.platform.comm.channel.blocks import SharedBlock, room_for

if TYPE_CHECKING:
    from torch import Tensor

    from orchestray.platform.comm.channel.base import Channel
    from orchestray.platform.comm.channel.blocks import Place
    from orchestray.trainers.ps.server.shard import Shard


class Versions:
    """A record of which worker reads which version of a shard. Used while the server is locked, except `show`."""

    def __init__(self, shard: Shard) -> None:
        """
        Args:
            shard: shard whose values are lent.
        """
        self._shard = shard
        self._blocks: dict[int, SharedBlock] = {}
        """Blocks by the address of the tensor that fills each."""
        self._read: dict[Channel, deque[tuple[int, Tensor]]] = {}
        """Values that each worker was lent and may still read, with their versions, the oldest first."""
        self._abandoned: list[Tensor] = []
        """Values that are never given back."""

    def lend(self, channel: Channel) -> Tensor:
        """Lend the present values to the worker at the other end; return the tensor to `show` it."""
        shard = self._shard
        if shard.values.data_ptr() not in self._blocks:
            shard.live_in(self._take)
        values = shard.lend()
        self._read.setdefault(channel, deque()).append((shard.version, values))
        return values

    def settle(self, channel: Channel, version: int) -> None:
        """Take back the values older than `version`, which the worker now reads."""
        read = self._read.get(channel, deque())
        while read and read[0][0] < version:
            self._shard.give_back(read.popleft()[1])

    def end(self, channel: Channel, *, reads_on: bool) -> None:
        """End the loans of a channel.

        Args:
            channel: channel that has ended.
            reads_on: True if the worker may go on computing with what it was lent; that memory is then not used again.
        """
        for _, values in self._read.pop(channel, ()):
            if reads_on:
                self._abandoned.append(values)
            else:
                self._shard.give_back(values)

    def show(self, channel: Channel, values: Tensor) -> Place:
        """Return the place where a worker finds what it was lent. Called without the lock, by the thread that answers
        the worker.
        """
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
