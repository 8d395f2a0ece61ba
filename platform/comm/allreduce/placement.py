"""The assignment of ranks to places in a schedule, so that few messages cross the slow links between nodes.

Ben-Nun and Hoefler (2019), section 2.5: ranks are mapped, and messages ordered, by the topology of the network. Here
the network has two levels: ranks of one node are near each other. In all schedules neighbouring places communicate the
most, and in Rabenseifner's they exchange the largest parts. The ranks of a node therefore take neighbouring places.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestray.platform.comm.allreduce.schedules import Part, Step, schedule


def order_by_node(nodes: Sequence[str]) -> list[int]:
    """Return the ranks in the order of their places: grouped by node, nodes in the order of their first rank.

    Args:
        nodes: node of each rank.
    """
    first = {node: nodes.index(node) for node in dict.fromkeys(nodes)}
    return sorted(range(len(nodes)), key=lambda rank: (first[nodes[rank]], rank))


def placed_schedule(algorithm: str, rank: int, order: Sequence[int], num_elements: int) -> list[Step]:
    """Return the steps of `schedule` if rank `order[i]` takes place i; the order must be the same on every rank."""

    def with_rank(part: Part | None) -> Part | None:
        return None if part is None else part._replace(peer=order[part.peer])

    steps = schedule(algorithm, order.index(rank), len(order), num_elements)
    return [Step(step.round, with_rank(step.send), with_rank(step.receive), step.combine) for step in steps]


def crossings(algorithm: str, nodes: Sequence[str], order: Sequence[int], num_elements: int) -> tuple[int, int]:
    """Count the messages and the elements that go from one node to another in the whole all-reduce."""
    parts = [
        step.send
        for rank in range(len(nodes))
        for step in placed_schedule(algorithm, rank, order, num_elements)
        if step.send is not None and step.send.num_elements and nodes[step.send.peer] != nodes[rank]
    ]
    return len(parts), sum(part.num_elements for part in parts)
