"""The driver's end of the gang of servers: which of them serves which shard, who is a copy, and who takes over.

It imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from orchestray.platform.errors import OrchestrayError
from orchestray.platform.gang.gang import Gang, MemberLostError
from orchestray.platform.gang.member import Identity
from orchestray.trainers.central.address import Address

if TYPE_CHECKING:
    from orchestray.trainers.central.address import StagePlan
    from orchestray.trainers.replica.settings import Start

_FOLLOW_TIMEOUT_S = 60.0


class Primaries:
    """The servers of a run.

    Attributes:
        gang: of all servers; rank r is of shard r mod shards.
        building: references of servers that are being made copies, with their ranks.
        ends: of each rank a reference that is ready once its process is dead.
    """

    def __init__(self, gang: Gang, num_shards: int) -> None:
        self.gang = gang
        self.num_shards = num_shards
        self.building: dict[Any, int] = {}
        self.ends: dict[int, Any] = {}
        self._serving: list[int] = []
        """The server of each shard that serves it; the others of the shard are its copies."""
        self._nodes: list[str] = []
        self._ports: list[int] = []
        self._start: Start | None = None
        self._plan: StagePlan | None = None
        self._num_meetings = 0

    def begin(self, start: Start, plan: StagePlan | None) -> None:
        """Have the servers serve from the newest checkpoint there is.

        Args:
            start: of this attempt.
            plan: of replicas in stages.

        Raises:
            MemberLostError: a server died.
        """
        gang = self.gang
        self._start, self._plan = start, plan
        self.building.clear()
        self._nodes = gang.nodes()
        self._ports = gang.gather(
            [gang.call_one(rank, "begin", rank, start, node, None, plan) for rank, node in enumerate(self._nodes)]
        )
        self._serving = list(range(self.num_shards))
        follows = [self._attach_copy(rank) for rank in range(self.num_shards, len(gang.seats))]
        if follows:  # from the first update on each is in two places
            ray.wait(follows, num_returns=len(follows), timeout=_FOLLOW_TIMEOUT_S)

    def watch(self) -> None:
        """Learn of deaths from now on."""
        self.ends = dict(enumerate(self.gang.watch()))

    def lost(self) -> dict[int, str]:
        """Why processes have ended, by rank, of those that have."""
        causes = {}
        for rank, reference in self.ends.items():
            if ray.wait([reference], timeout=0)[0]:
                try:
                    ray.get(reference)
                except RayError as error:
                    causes[rank] = self.gang.cause(rank, error)
        return causes

    # -- the lead ----------------------------------------------------------------------------------------------------

    @property
    def lead(self) -> int:
        """The server that holds the ledger."""
        return self._serving[0]

    def ask_lead(self, method: str, *arguments: Any) -> Any:
        """Run a method of the lead's beside its work; returns the Ray reference of its answer."""
        return self.gang.control_one(self.lead, method, *arguments)

    def meeting(self, name: str) -> Address:
        """Where the stages of a replica can meet under this name."""
        return Address(self._nodes[self.lead], self._ports[self.lead], name)

    # -- who is connected --------------------------------------------------------------------------------------------

    def expect(self, number: int, name: str, shards: range | None = None) -> list[Address]:
        """Have the servers of some shards (default: all) expect a worker, or a leaf server; returns where they are."""
        chosen = range(self.num_shards) if shards is None else shards
        return [self.expect_at(self._serving[shard], number, name) for shard in chosen]

    def expect_at(self, server: int, number: int, name: str) -> Address:
        """As `expect`, of one server."""
        self.gang.control_one(server, "accept", number, name)
        return Address(self._nodes[server], self._ports[server], name)

    # -- copies ------------------------------------------------------------------------------------------------------

    def serves(self, rank: int) -> bool:
        """Whether workers talk to this server, which is no copy then."""
        return rank in self._serving

    def take_over(self, rank: int, lost: Mapping[int, str], reroute: Callable[[int, int], None]) -> int | None:
        """Have a copy of a lost server serve in its place.

        Args:
            rank: of the lost server.
            lost: all that are lost, with the causes.
            reroute: called with the shard and the server that serves it from now on.

        Returns:
            The rank of the copy; None if there is none.
        """
        shard = rank % self.num_shards
        copies = [other for other in range(shard, len(self.gang.seats), self.num_shards) if other not in lost]
        for copy in copies:
            try:
                port = self.gang.gather_one(self.gang.call_one(copy, "promote"), copy)
            except OrchestrayError:
                continue  # it died too, or never had the state
            self._serving[shard], self._ports[copy] = copy, port
            reroute(shard, copy)
            self.build_copies([other for other in copies if other != copy])
            return copy
        return None

    def build_copies(self, ranks: list[int]) -> None:
        """Make servers copies of the ones that serve now; `go_on_building` does the rest, while the run goes on."""
        for rank in ranks:
            self.building[self.gang.seats[rank].identifying] = rank

    def go_on_building(self, reference: Any) -> None:
        """One of `building` is ready: do what comes next."""
        rank = self.building.pop(reference)
        try:
            answer = self.gang.gather_one(reference, rank)
        except MemberLostError:
            return  # seen in its own place
        if isinstance(answer, Identity):
            self._nodes[rank] = answer.node
            arguments = (rank, self._start, answer.node, True, self._plan)
            self.building[self.gang.call_one(rank, "begin", *arguments)] = rank
        else:
            self._ports[rank] = answer
            self._attach_copy(rank)

    def _attach_copy(self, rank: int) -> Any:
        """Have a server that has just been built follow the one it is a copy of; a death meanwhile is seen later.

        Returns a Ray reference that is ready once it has the present state.
        """
        self._num_meetings += 1
        name = f"copy-{rank}-{self._num_meetings}"
        primary = self._serving[rank % self.num_shards]
        self.gang.control_one(rank, "follow", name)
        return self.gang.control_one(primary, "replicate", Address(self._nodes[rank], self._ports[rank], name))
