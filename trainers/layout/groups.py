"""The process groups of one worker: one with its neighbours along each axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.platform.comm.channel.base import ChannelError
from orchestray.platform.comm.channel.nearest import open_channel
from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.platform.comm.solo import SoloCollective

if TYPE_CHECKING:
    from orchestray.platform.comm.channel.base import Channel
    from orchestray.platform.process.wait_clock import Waiting
    from orchestray.trainers.layout.degrees import Axis, Coordinate, Layout


class Groups:
    """The connected collectives of one worker of a layout. One `abort` leaves them all."""

    def __init__(self, layout: Layout, world: Collective) -> None:
        """Connect this worker's groups; every worker of the layout must do so at the same time.

        Args:
            layout: the degrees.
            world: all workers, in the order of ranks.
        """
        if world.size != layout.size:
            raise ValueError(f"the layout has {layout.size} workers, the group {world.size}")
        self.layout = layout
        self.world = world
        self.rank = world.rank
        self.coordinate: Coordinate = layout.coordinate(world.rank)
        self.data = self._along("data")
        self.tensor = self._along("tensor")
        self.pipeline = self._along("pipeline")
        """Workers in the order of the pipeline; for small messages only: tensors between stages use `channel`."""
        members = layout.model_group(world.rank)
        self.model = world.subgroup(f"model-{members[0]}", members)
        """Workers that hold one copy of the model together."""
        self._channels: list[Channel] = []

    def _along(self, axis: Axis) -> Collective:
        ranks = self.layout.group(self.rank, axis)
        return self.world.subgroup(f"{axis}-{ranks[0]}", ranks)

    def channel(self, peer: int, name: str, timeout_s: float = 600.0) -> Channel:
        """Open a channel to the worker of rank `peer`, which must open one of the same name at the same time.

        Args:
            peer: rank of the other worker.
            name: name of the channel, unique among those of the two workers.
            timeout_s: seconds to wait for the other worker.

        Raises:
            PeerLostError: the channel could not be opened, or the groups were left meanwhile.
        """
        first, second = sorted((self.rank, peer))
        try:
            opened = open_channel(
                self.world.prefix_store(f"channel-{first}-{second}-{name}"),
                0 if self.rank == first else 1,
                name=f"worker {self.rank}",
                peer=f"worker {peer}",
                timeout_s=timeout_s,
            )
        except ChannelError as error:
            raise PeerLostError(str(error)) from error
        self._channels.append(opened)
        self.world.channels.append(opened)
        if self.world.is_left:  # `abort` came before: the other worker will send nothing, and may not close its end
            opened.close()
            raise PeerLostError("the groups were left while a channel was opened")
        return opened

    @property
    def bytes_sent(self) -> int:
        """Bytes that this worker sent in all its groups and channels."""
        return self.world.bytes_sent + sum([channel.bytes_sent for channel in self._channels])

    @property
    def waiting(self) -> Waiting:
        """Record of the time that this worker waits in its groups."""
        return self.world.waiting

    def abort(self) -> None:
        """Leave every group and channel, so that the other workers notice at once.

        May be called from any thread, and more than once.
        """
        self.world.abort()  # first: a channel that is opened meanwhile is closed here, or by the one that opens it
        for channel in self._channels:
            channel.close()


def solo_groups(layout: Layout) -> Groups:
    """Return the groups of a single worker."""
    return Groups(layout, SoloCollective())
