"""The driver's view of the gang of servers: the server of each shard, its copies, and their takeovers.

It imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from orchestray.platform.actors.gang import Gang, MemberLostError
from orchestray.platform.actors.member import Identity
from orchestray.platform.errors import OrchestrayError
from orchestray.trainers.ps.protocol.address import Address

if TYPE_CHECKING:
    from orchestray.trainers.config.settings import Start
    from orchestray.trainers.ps.protocol.address import StagePlan

_FOLLOW_TIMEOUT_S = 60.0


class ServerGroup:
    """The servers of a run.

    Attributes:
        gang: gang of all servers; rank r is of shard r mod shards.
        building: references of servers that are being made copies, with their ranks.
        ends: for each rank a reference that is ready once its process is dead.
    """

    def __init__(self, gang: Gang, num_shards: int) -> None:
        self.gang = gang
        self.num_shards = num_shards
        self.building: dict[Any, int] = {}
        self.ends: dict[int, Any] = {}
        self._serving: list[int] = []
        """Rank of the server that serves each shard; the shard's other servers are its copies."""
        self._nodes: list[str] = []
        self._ports: list[int] = []
        self._start: Start | None = None
        self._plan: StagePlan | None = None
        self._num_meetings = 0

    def begin(self, start: Start, plan: StagePlan | None) -> None:
        """Have the servers serve from the newest checkpoint there is.

        Args:
            start: start of this attempt.
            plan: plan of replicas in stages, or None.

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
        follows = [self._attach_copy(rank) for rank in range(self.num_shards, len(gang.slots))]
        if follows:  # so that every update, from the first on, is in two places
            ray.wait(follows, num_returns=len(follows), timeout=_FOLLOW_TIMEOUT_S)

    def watch(self) -> None:
        """Watch for deaths from now on."""
        self.ends = dict(enumerate(self.gang.watch()))

    def lost(self) -> dict[int, str]:
        """Return the causes of the deaths of those processes that have ended, by rank."""
        causes = {}
        for rank, reference in self.ends.items():
            if ray.wait([reference], timeout=0)[0]:
                try:
                    ray.get(reference)
                except RayError as error:
                    causes[rank] = self.gang.cause(rank, error)
        unheard = self.gang.unheard({reference: rank for rank, reference in self.ends.items()})
        return causes | {rank: unheard[reference] for rank, reference in self.ends.items() if reference in unheard}

    # -- the lead ----------------------------------------------------------------------------------------------------

    @property
    def lead(self) -> int:
        """Rank of the server that holds the coordinator."""
        return self._serving[0]

    def ask_lead(self, method: str, *arguments: Any) -> Any:
        """Call a method of the lead in parallel to its work; return the Ray reference of its answer.

        Args:
            method: name of the method of `ServerHost`.
            arguments: its arguments.
        """
        return self.gang.control_one(self.lead, method, *arguments)

    def meeting(self, name: str) -> Address:
        """Return the address at which the stages of a replica can meet under this name."""
        return Address(self._nodes[self.lead], self._ports[self.lead], name)

    # -- connections -------------------------------------------------------------------------------------------------

    def expect(self, number: int, name: str, shards: range | None = None) -> list[Address]:
        """Have the servers of some shards expect a worker or a leaf server; return their addresses.

        Args:
            number: number of the worker or leaf.
            name: name of the meeting.
            shards: shards; default: all.
        """
        chosen = range(self.num_shards) if shards is None else shards
        return [self.expect_at(self._serving[shard], number, name) for shard in chosen]

    def expect_at(self, server: int, number: int, name: str) -> Address:
        """Have one server expect a worker or a leaf server; return its address.

        Args:
            server: rank of the server.
            number: number of the worker or leaf.
            name: name of the meeting.
        """
        self.gang.control_one(server, "accept", number, name)
        return Address(self._nodes[server], self._ports[server], name)

    # -- copies ------------------------------------------------------------------------------------------------------

    def serves(self, rank: int) -> bool:
        """Return True if workers are connected to this server; otherwise it is a copy."""
        return rank in self._serving

    def take_over(self, rank: int, lost: Mapping[int, str], reroute: Callable[[int, int], None]) -> int | None:
        """Have a copy serve instead of a lost server.

        Args:
            rank: rank of the lost server.
            lost: causes of all losses, by rank.
            reroute: called with the shard and the server that serves it from now on.

        Returns:
            The rank of the copy; None if there is none.
        """
        shard = rank % self.num_shards
        copies = [other for other in range(shard, len(self.gang.slots), self.num_shards) if other not in lost]
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
        """Begin to make servers copies of the present primaries; `go_on_building` does the rest during the run."""
        for rank in ranks:
            self.building[self.gang.slots[rank].identifying] = rank

    def go_on_building(self, reference: Any) -> None:
        """Continue with a server of `building` whose reference is ready."""
        rank = self.building.pop(reference)
        try:
            answer = self.gang.gather_one(reference, rank)
        except MemberLostError:
            return  # `lost` reports it
        if isinstance(answer, Identity):
            self._nodes[rank] = answer.node
            arguments = (rank, self._start, answer.node, True, self._plan)
            self.building[self.gang.call_one(rank, "begin", *arguments)] = rank
        else:
            self._ports[rank] = answer
            self._attach_copy(rank)

    def _attach_copy(self, rank: int) -> Any:
        """Have a server that has just been built follow its primary; a death meanwhile is seen later.

        Return a Ray reference that is ready once the copy has the present state.
        """
        self._num_meetings += 1
        name = f"copy-{rank}-{self._num_meetings}"
        primary = self._serving[rank % self.num_shards]
        self.gang.control_one(rank, "follow", name)
        return self.gang.control_one(primary, "replicate", Address(self._nodes[rank], self._ports[rank], name))
