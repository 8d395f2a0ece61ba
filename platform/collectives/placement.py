"""Which rank takes which place in a schedule, so that few messages cross the slow links between nodes.

Ben-Nun and Hoefler (2019), section 2.5: ranks are mapped, and messages ordered, by the topology of the network. Here
the network has two levels: ranks of one node are near each other. In all schedules neighbouring places talk the most,
and in Rabenseifner's they exchange the largest parts, so the ranks of a node take places side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestray.platform.collectives.schedules import Part, Step, schedule


def order_by_node(nodes: Sequence[str]) -> list[int]:
    """The ranks in the order of their places: node by node, each where its first rank comes.

    Args:
        nodes: of each rank, where it runs.
    """
    first = {node: nodes.index(node) for node in dict.fromkeys(nodes)}
    return sorted(range(len(nodes)), key=lambda rank: (first[nodes[rank]], rank))


def placed_schedule(algorithm: str, rank: int, order: Sequence[int], num_elements: int) -> list[Step]:
    """As `schedule`, where rank `order[i]` takes the place i. The order must be the same on every rank."""

    def seated(part: Part | None) -> Part | None:
        return None if part is None else part._replace(peer=order[part.peer])

    steps = schedule(algorithm, order.index(rank), len(order), num_elements)
    return [Step(step.round, seated(step.send), seated(step.receive), step.combine) for step in steps]


def crossings(algorithm: str, nodes: Sequence[str], order: Sequence[int], num_elements: int) -> tuple[int, int]:
    """Messages, and elements, that go from one node to another in the whole all-reduce."""
    parts = [
        step.send
        for rank in range(len(nodes))
        for step in placed_schedule(algorithm, rank, order, num_elements)
        if step.send is not None and step.send.num_elements and nodes[step.send.peer] != nodes[rank]
    ]
    return len(parts), sum(part.num_elements for part in parts)
