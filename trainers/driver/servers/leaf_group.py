"""The driver's view of the gang of leaf servers: which leaf each worker works for.

It imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from orchestray.platform.actors.gang import Gang, MemberLostError
from orchestray.platform.actors.locality import Where, groups_of_near
from orchestray.trainers.ps.protocol.address import Address

if TYPE_CHECKING:
    from orchestray.trainers.config.settings import Start

LEAF_HOST = "orchestray.trainers.ps.variants.hierarchy.leaf_host:LeafHost"

Expect = Callable[[int, str], list[Address]]
"""Has the primaries expect a connection of this number and name; returns their addresses, in the order of shards."""


class Leaves:
    """The leaf servers of a run, each for workers that are near each other and near the leaf."""

    def __init__(
        self, gang: Gang, lose: Callable[[Gang, int, str], None], replaced: Callable[[Gang, int], None]
    ) -> None:
        """
        Args:
            gang: gang of the leaf servers, each of which has begun to build its host.
            lose: called with a lost rank and the cause; raises if the run may not go on.
            replaced: called when another process has replaced it.
        """
        self.gang = gang
        self._lose, self._replaced = lose, replaced
        self._nodes: list[str] = []
        self._ports: list[int] = []
        self._num_meetings = 0
        self._total_steps: int | None = None
        self._start: Start | None = None
        self._expect: Expect | None = None

    def begin(self, start: Start, total_steps: int | None, expect: Expect) -> None:
        """Have all leaves connect to the present servers, and serve.

        Args:
            start: start of this attempt.
            total_steps: number of steps of the run.
            expect: has the primaries expect a leaf.
        """
        self._start, self._total_steps, self._expect = start, total_steps, expect
        self._nodes, self._ports = [""] * len(self.gang.slots), [0] * len(self.gang.slots)
        for leaf in range(len(self.gang.slots)):
            self._begin(leaf)

    def expect(self, worker: int, name: str, nodes: Sequence[Where]) -> Address:
        """Have a worker's leaf expect it under this name; return the leaf's address.

        Args:
            worker: rank of the worker.
            name: name of the meeting.
            nodes: present nodes of all workers: one that has moved to another node may get another leaf.

        Raises:
            MemberLostError: the leaf is lost.
        """
        leaf = groups_of_near(nodes, len(self.gang.slots))[worker]
        self.gang.gather_one(self.gang.control_one(leaf, "accept", worker, name), leaf)
        return Address(self._nodes[leaf], self._ports[leaf], name)

    def reroute(self, shard: int, expect: Callable[[int, str], Address]) -> None:
        """Send all leaves the address of the server that has taken over a shard.

        Args:
            shard: index of the shard.
            expect: has the new server expect a leaf, and returns its address.
        """
        for leaf in range(len(self.gang.slots)):
            self._num_meetings += 1
            address = expect(-1 - leaf, f"leaf-{leaf}-{self._num_meetings}")
            self.gang.control_one(leaf, "reroute", shard, address)

    def _begin(self, leaf: int) -> None:
        while True:
            try:
                self._connect(leaf)
            except MemberLostError as loss:
                self._put_another(leaf, loss.lost[leaf])
            else:
                return

    def _connect(self, leaf: int) -> None:
        assert self._expect is not None
        gang = self.gang
        node = gang.gather_one(gang.slots[leaf].identifying, leaf).node
        self._num_meetings += 1
        servers = self._expect(-1 - leaf, f"leaf-{leaf}-{self._num_meetings}")
        arguments = (leaf, self._start, node, servers, self._total_steps)
        self._nodes[leaf] = node
        self._ports[leaf] = int(gang.gather_one(gang.call_one(leaf, "begin", *arguments), leaf))

    def _put_another(self, leaf: int, cause: str) -> None:
        self._lose(self.gang, leaf, cause)
        self.gang.replace(leaf)
        self._replaced(self.gang, leaf)
