"""Where the members of gangs come to be on a cluster: `python -m support.placements ADDRESS` prints it as JSON."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from orchestray.platform.cluster.cluster import connect

if TYPE_CHECKING:
    from orchestray.platform.gang.gang import Gang


class Here:
    """What the gangs host."""

    def node_id(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())


def nodes_of(gang: Gang) -> list[str]:
    """Told by the processes themselves, in the order of ranks."""
    gang.host("support.placements:Here")
    return [str(node) for node in gang.gather(gang.call("node_id"))]


def main() -> None:
    cluster = connect(sys.argv[1])
    from orchestray.platform.gang.gang import Gang
    from orchestray.platform.gang.placement import Shape

    servers = Gang(cluster, Shape("parameter_server", 4, cpus_per_member=0.0, apart=2))
    print(json.dumps({"servers": nodes_of(servers)}))
    cluster.close()


if __name__ == "__main__":
    main()
