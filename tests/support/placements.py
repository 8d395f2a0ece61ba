"""Placements of the members of gangs on a cluster: `python -m support.placements ADDRESS` prints them as JSON."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from orchestray.platform.actors.locality import groups_of_near
from orchestray.platform.cluster.cluster import connect

if TYPE_CHECKING:
    from orchestray.platform.actors.gang import Gang


class Here:
    """An actor that knows its node, for the gangs to host."""

    def node_id(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())


def nodes_of(gang: Gang) -> list[str]:
    """Return the nodes of the members, in the order of ranks, as the processes themselves report them."""
    gang.host("support.placements:Here")
    return [str(node) for node in gang.gather(gang.call("node_id"))]


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
