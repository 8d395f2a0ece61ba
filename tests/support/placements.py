"""Placements of the members of gangs on a cluster: `python -m support.placements ADDRESS` prints them as JSON."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from orchestray.platform.actors.locality import groups_of_near
from orchestray.platform.cluster.cluster import connect

if TYPE_CHECKING:
    from orchestray.platform.actors.gang import Gang


def node_id(_member: Any) -> str:
    """Return the node of the process that this is called in."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def nodes_of(gang: Gang) -> list[str]:
    """Return the nodes of the members, in the order of ranks, as the processes themselves report them.

    They host nothing: ten imports of torch would show nothing more.
    """
    import ray

    nodes: list[str] = ray.get([slot.actor.__ray_call__.remote(node_id) for slot in gang.slots])
    return nodes


def main() -> None:
    cluster = connect(*sys.argv[1:])
    from orchestray.platform.actors.placement import Shape
    from orchestray.platform.actors.pool import acquire_all

    shapes = [
        Shape("parameter_server", 4, cpus_per_member=0.0, apart=2),
        Shape("worker", 4),
        Shape("leaf_server", 2, cpus_per_member=0.0, beside="worker"),
    ]
    gangs = acquire_all(cluster, shapes)
    found = {gang.shape.role: nodes_of(gang) for gang in gangs}
    print(json.dumps({**found, "groups": groups_of_near(gangs[1].whereabouts(), 2)}))
    cluster.close()


if __name__ == "__main__":
    main()
