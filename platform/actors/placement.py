"""Placement of gang members: requests for placement groups, and the errors when the cluster has no room."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from orchestray.platform.actors.locality import NOWHERE, Where
from orchestray.platform.cluster.cluster import Cluster, available_cpus
from orchestray.platform.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

PLACEMENT_TIMEOUT_S = 25.0
"""Time the cluster has to find a place."""
_SETTLE_TIMEOUT_S, _SETTLE_LOOK_S = 5.0, 0.002
_NEXT_TO_NOTHING = {"memory": 1.0}
"""One byte of memory: Ray does not accept empty bundles."""


@dataclass(frozen=True)
class Shape:
    """The number of members of a gang, their resources, and their placement relative to each other."""

    role: str
    size: int
    cpus_per_member: float = 1.0
    gpus_per_member: float = 0.0
    spares: int = 0
    neighbours: int = 1
    """Members of consecutive ranks that share a node, if one has enough room; divides `size`."""
    node: str = ""
    """Address of the node that all members are placed on; empty: any node with room."""
    apart: int = 0
    """Distance of ranks to spread: members r, r + apart, r + 2 apart, ... get different nodes if there are enough.

    Divides `size`, which then has no neighbours and no spares. 0: all members are packed together.
    """
    beside: str = ""
    """Role of another gang, created together with this one.

    Each member is placed on the main node of one group of the other gang's members (see `locality`), as long as that
    node exists. Nothing is reserved, so this is for members that request no resources.
    """


@dataclass(frozen=True)
class Place:
    """A bundle of a placement group with room for one member or a group of neighbours, or only a preferred node."""

    group: PlacementGroup | None
    bundle: int
    cpus: float
    """CPUs of each member there."""
    capacity: int = 1
    """Number of members it has room for."""
    node: str = ""
    """Id of the preferred node, for a place without a placement group."""

    def strategy(self, cluster: Cluster) -> Any:
        """Return Ray's scheduling strategy for this place."""
        if self.group is not None:
            return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundle)
        # Not soft: otherwise Ray 2.60 picks any node, even if the preferred one has room.
        if any(node["NodeID"] == self.node for node in cluster.nodes()):
            return NodeAffinitySchedulingStrategy(self.node, soft=False)
        return "DEFAULT"


@dataclass(frozen=True)
class Reserved:
    """The places that a gang has been given."""

    members: Sequence[Place]
    """Places in the order of ranks, one for each group of neighbours."""
    spares: Sequence[Place]
    groups: Sequence[PlacementGroup]
    """Placement groups that belong to the gang and are removed with it."""


def share_cpus(cluster: Cluster, shape: Shape, notify: Callable[[str], None]) -> tuple[float, int]:
    """Return the logical CPUs to reserve for a member, and the number of threads it may use.

    On a cluster of our own, more workers than cores are allowed: they run more slowly, with a warning. On a shared
    cluster a reservation is a promise to others, so requests for missing CPUs are refused.
    """
    wanted, num_members = shape.cpus_per_member, shape.size + shape.spares
    total = cluster.resources().get("CPU", 0.0)
    if not cluster.owned or wanted * num_members <= total:
        return wanted, max(1, int(wanted))
    fair = math.floor(total / num_members * 1000) / 1000
    counted = f"{num_members} workers" + (" (spares included)" if shape.spares else "")
    notify(
        f"{counted} of {wanted:g} CPU(s) share the {available_cpus()} core(s) of this machine: "
        "expect them to be slower, not faster."
    )
    return fair, 1


def that_share_a_node(cluster: Cluster, shape: Shape, cpus: float, notify: Callable[[str], None]) -> int:
    """Return the number of members of consecutive ranks that are placed together."""
    if shape.neighbours == 1:
        return 1
    wanted = _amounts(cpus * shape.neighbours, shape.gpus_per_member * shape.neighbours)
    if any(all(node["Resources"].get(k, 0.0) >= v for k, v in wanted.items()) for node in cluster.nodes()):
        return shape.neighbours
    notify(
        f"warning: no node has room for {shape.neighbours} workers that compute the same samples together: they will "
        "talk over the network several times a step."
    )
    return 1


def node_for_all(cluster: Cluster, shape: Shape) -> str:
    """Return the address of a node with room for all members, for `Shape.node`; empty if there is only one node.

    Raises:
        ClusterError: no node has enough room.
    """
    nodes, num_members = cluster.nodes(), shape.size + shape.spares
    if len(nodes) == 1:
        return ""
    each = _amounts(shape.cpus_per_member, shape.gpus_per_member)
    for node in nodes:
        if all(node["Resources"].get(name, 0.0) >= amount * num_members for name, amount in each.items()):
            return str(node["NodeManagerAddress"])
    raise ClusterError(
        f"No node of the cluster has room for {_asked(num_members, each)}, and they have to be on one node: they share "
        "its memory (strategy.exchange.transport: shared_memory). Ask for fewer or for less each, or use transport: "
        "channel."
    )


def _pin(shape: Shape) -> dict[str, float]:
    """Return the resource that binds a bundle to the shape's node: Ray gives each node a resource of its own."""
    return {f"node:{shape.node}": 0.001} if shape.node else {}


def _amounts(cpus: float, gpus: float) -> dict[str, float]:
    return {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount > 0}


def place(
    cluster: Cluster, shape: Shape, neighbours: int, cpus: float, advice: str = "", *, nodes: Sequence[Where] = ()
) -> Reserved:
    """Reserve a place for each group of neighbours, and one for each spare.

    Args:
        cluster: cluster to reserve in.
        shape: shape of the gang.
        neighbours: members per place.
        cpus: CPUs of each member.
        advice: ending of the error message: what else the user can do if there is too little.
        nodes: preferred nodes of members without a reservation.

    Raises:
        ClusterError: the cluster has too few resources, or too few free ones now.
    """
    num_groups = shape.size // neighbours
    if cluster.room is not None:  # the placement group was made by others: any bundle will do
        spare = Place(cluster.room, -1, cpus)
        return Reserved([replace(spare, capacity=neighbours)] * num_groups, [spare] * shape.spares, [])
    if nodes:
        return Reserved([Place(None, -1, cpus, node=node) for _, node in nodes], [], [])
    bundle = _amounts(cpus, shape.gpus_per_member)
    num_members = shape.size + shape.spares
    _check_total(cluster, num_members, bundle, advice)
    together = {name: amount * neighbours for name, amount in bundle.items()}
    pin = _pin(shape)
    member = {**together, **pin} or _NEXT_TO_NOTHING
    bundles = [member] * num_groups + [{**bundle, **pin} or _NEXT_TO_NOTHING] * shape.spares
    if apart := shape.apart:
        groups = [placement_group([member] * (shape.size // apart), strategy="SPREAD") for _ in range(apart)]
        places = [Place(groups[rank % apart], rank // apart, cpus) for rank in range(shape.size)]
    else:
        groups = [placement_group(bundles, strategy="PACK")]
        places = [
            Place(groups[0], index, cpus, neighbours if index < num_groups else 1) for index in range(len(bundles))
        ]
    reserved = Reserved(places[:num_groups], places[num_groups:], groups)
    deadline_s = time.monotonic() + PLACEMENT_TIMEOUT_S
    if all(group.wait(timeout_seconds=max(1, round(deadline_s - time.monotonic()))) for group in groups):
        return reserved
    give_back(places)
    raise no_place_in_time(cluster, num_members, bundle)


def check_place(cluster: Cluster, shape: Shape, advice: str = "") -> None:
    """Check that the cluster has room for a gang now, if the caller places it later; nothing stays reserved.

    Args:
        cluster: cluster to check.
        shape: shape of the gang; each member gets all the CPUs it requests.
        advice: ending of the error message: what else the user can do if there is too little.

    Raises:
        ClusterError: the cluster has too few resources, or too few free ones now.
    """
    give_back(place(cluster, shape, 1, shape.cpus_per_member, advice).members)


def _check_total(cluster: Cluster, num_members: int, bundle: Mapping[str, float], advice: str = "") -> None:
    total = cluster.resources()
    for name, amount in bundle.items():
        if amount * num_members > total.get(name, 0.0) + 1e-6:
            raise ClusterError(
                f"The cluster cannot place {_asked(num_members, bundle)}: that is {amount * num_members:g} {name}, and "
                f"it has {cluster.describe()}. Ask for fewer workers (strategy.network) or less for each (resources)"
                f"{advice}."
            )


def no_place_in_time(cluster: Cluster, num_members: int, bundle: Mapping[str, float]) -> ClusterError:
    """Return the error for a placement that timed out; `bundle` is what each member requests."""
    free = ray.available_resources()
    return ClusterError(
        f"The cluster could not place {_asked(num_members, bundle)} within {PLACEMENT_TIMEOUT_S:g} s: it has "
        f"{cluster.describe()}, of which {free.get('CPU', 0):g} CPU and {free.get('GPU', 0):g} GPU are free. Wait for "
        "other jobs to end, or ask for less."
    )


def _asked(num_members: int, bundle: Mapping[str, float]) -> str:
    each = " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    return f"{num_members} worker(s) with {each} each"


class Room:
    """A set of places for new members of a gang, requested at once and ready when the cluster has found them.

    Each place is a placement group of its own, so that it can be released alone.
    """

    def __init__(
        self, cluster: Cluster, shape: Shape, num_members: int, neighbours: int, notify: Callable[[str], None]
    ) -> None:
        """Request the places.

        Args:
            cluster: cluster to reserve in.
            shape: shape of the gang without the new members.
            num_members: number of members to add; a multiple of `neighbours`.
            neighbours: members that share a place.
            notify: called with a warning if the new members get no CPU of their own (only on a cluster of our own).

        Raises:
            ClusterError: the cluster has too few resources, even if all were free.
        """
        self._cluster, self._num_members = cluster, num_members
        cpus = shape.cpus_per_member
        if cluster.owned and cpus * num_members > ray.available_resources().get("CPU", 0.0) + 1e-6:
            cpus = 0.0
            notify(
                f"{num_members} more worker(s) share the {available_cpus()} core(s) of this machine with the others."
            )
        self._each = _amounts(cpus, shape.gpus_per_member)
        counted = _amounts(0.0 if cluster.owned else cpus, shape.gpus_per_member)
        _check_total(cluster, shape.size + shape.spares + num_members, counted)
        together = {name: amount * neighbours for name, amount in self._each.items()}
        self._deadline_s = time.monotonic() + PLACEMENT_TIMEOUT_S
        bundle = {**together, **_pin(shape)} or _NEXT_TO_NOTHING
        self._groups = [placement_group([bundle]) for _ in range(num_members // neighbours)]
        self.places = [Place(group, 0, cpus, neighbours) for group in self._groups]

    def is_there(self) -> bool:
        """Return True if all places are ready; never wait.

        Raises:
            ClusterError: the places were not found in time.
        """
        if all(is_created(group) for group in self._groups):
            return True
        if time.monotonic() > self._deadline_s:
            raise no_place_in_time(self._cluster, self._num_members, self._each)
        return False

    def give_back(self) -> None:
        """Release the places, which ends the processes in them."""
        give_back(self.places)


def is_created(group: PlacementGroup | None) -> bool:
    """Return True if a placement group is created, or if it is None (a mere preference for a node)."""
    return group is None or placement_group_table(group).get("state") == "CREATED"


def nodes_of(cluster: Cluster, places: Sequence[Place]) -> list[Where]:
    """Return the node of each place as Ray reports it now; do not wait for any process."""
    addresses = {node["NodeID"]: _number(node["NodeManagerAddress"]) for node in cluster.nodes()}
    groups = dict.fromkeys(place.group for place in places if place.group is not None)
    tables = {group: placement_group_table(group)["bundles_to_node_id"] for group in groups}
    ids = [place.node if place.group is None else tables[place.group].get(place.bundle, "") for place in places]
    return [(addresses[node], node) if node in addresses else NOWHERE for node in ids]


def _number(address: str) -> int:
    try:
        return int(ip_address(address))
    except ValueError:  # a host name
        return 0


def give_back(places: Sequence[Place]) -> None:
    """Remove the placement groups of these places."""
    remove([place.group for place in places if place.group is not None])


def settle(groups: Iterable[PlacementGroup]) -> None:
    """Wait until Ray has placed each group or found that it cannot: some milliseconds.

    If a group is removed while its bundles are prepared but not committed, Ray 2.60 never frees them. Later requests
    for them would wait for ever.
    """
    until_s = time.monotonic() + _SETTLE_TIMEOUT_S
    for group in groups:
        with contextlib.suppress(Exception):  # the cluster may be gone
            while not _is_settled(group) and time.monotonic() < until_s:
                time.sleep(_SETTLE_LOOK_S)


def _is_settled(group: PlacementGroup) -> bool:
    table = placement_group_table(group)
    is_over = table.get("state") in ("CREATED", "REMOVED")
    return is_over or table.get("stats", {}).get("scheduling_state") in ("NO_RESOURCES", "INFEASIBLE")


def remove(groups: Sequence[PlacementGroup]) -> None:
    """Remove placement groups, which ends the processes in them."""
    settle(dict.fromkeys(groups))
    for group in dict.fromkeys(groups):
        with contextlib.suppress(Exception):
            remove_placement_group(group)
