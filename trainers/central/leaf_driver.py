"""The driver's end of the gang of leaf servers: which worker is under which leaf, and leaves that are replaced.

It imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from orchestray.platform.gang.gang import Gang, MemberLostError
from orchestray.platform.gang.nearness import Where, groups_of_near
from orchestray.trainers.central.address import Address

if TYPE_CHECKING:
    from orchestray.trainers.replica.settings import Start

LEAF_HOST = "orchestray.trainers.central.leaf_host:LeafHost"

Expect = Callable[[int, str], list[Address]]
"""Tells the primaries to expect somebody of this number under this name; returns where they are, in order of shards."""


class Leaves:
    """The leaf servers of a run, each for workers that are near each other: those that it was put beside."""

    def __init__(
        self, gang: Gang, lose: Callable[[Gang, int, str], None], replaced: Callable[[Gang, int], None]
    ) -> None:
        """
        Args:
            gang: of them; each has begun to build its host.
            lose: called with a rank that is lost and the cause; raises if the run may not go on.
            replaced: called when another process is in its place.
        """
        self.gang = gang
        self._lose, self._replaced = lose, replaced
        self._nodes: list[str] = []
        self._ports: list[int] = []
        self._incarnation = 0
        self._total_steps: int | None = None
        self._start: Start | None = None
        self._expect: Expect | None = None

    def begin(self, start: Start, total_steps: int | None, expect: Expect) -> None:
        """Have all leaves connect with the servers as they are now, and serve."""
        self._start, self._total_steps, self._expect = start, total_steps, expect
        self._nodes, self._ports = [""] * len(self.gang.seats), [0] * len(self.gang.seats)
        for leaf in range(len(self.gang.seats)):
            self._begin(leaf)

    def expect(self, worker: int, name: str, nodes: Sequence[Where]) -> Address:
        """Have a worker's leaf expect it under this name; a leaf that is lost is replaced first.

        Args:
            worker: its rank.
            name: see above.
            nodes: of all workers, as they are now: one that has moved to another node may come under another leaf.
        """
        leaf = groups_of_near(nodes, len(self.gang.seats))[worker]
        try:
            self.gang.gather_one(self.gang.control_one(leaf, "accept", worker, name), leaf)
        except MemberLostError as loss:
            self._put_another(leaf, loss.lost[leaf])
            self._begin(leaf)
            self.gang.gather_one(self.gang.control_one(leaf, "accept", worker, name), leaf)
        return Address(self._nodes[leaf], self._ports[leaf], name)

    def reroute(self, shard: int, expect: Callable[[int, str], Address]) -> None:
        """Tell all leaves who has taken a shard over."""
        for leaf in range(len(self.gang.seats)):
            self._incarnation += 1
            address = expect(-1 - leaf, f"leaf-{leaf}-{self._incarnation}")
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
        node = gang.gather_one(gang.seats[leaf].identifying, leaf).node
        self._incarnation += 1
        servers = self._expect(-1 - leaf, f"leaf-{leaf}-{self._incarnation}")
        arguments = (leaf, self._incarnation, self._start, node, servers, self._total_steps)
        self._nodes[leaf] = node
        self._ports[leaf] = int(gang.gather_one(gang.call_one(leaf, "begin", *arguments), leaf))

    def _put_another(self, leaf: int, cause: str) -> None:
        self._lose(self.gang, leaf, cause)
        self.gang.replace(leaf)
        self._replaced(self.gang, leaf)
