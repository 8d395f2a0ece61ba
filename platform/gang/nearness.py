"""Members divided into groups of those that are near each other. Pure: nodes are told by whoever knows them."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

Where = tuple[int, str]
"""A node: its address as a number, so that the machines of one subnet follow each other; and its id in Ray."""
NOWHERE: Where = (0, "")
"""A node that nobody knows."""
_Node = TypeVar("_Node", bound="int | Where")


def groups_of_near(nodes: Sequence[_Node], num_groups: int) -> list[int]:
    """The group of each member, so that groups span as few nodes as can be, and are about of one size.

    With at least as many nodes as groups, a node is of one group, and the nodes of a group follow each other in their
    order; so machines of one place, with addresses next to each other, come together. With fewer, no group has members
    on two nodes, and those of one node take turns among its groups.

    Args:
        nodes: of each member.
        num_groups: to divide them into; some may be empty if there are fewer members.
    """
    sizes = Counter(nodes)
    order = sorted(sizes)
    if len(order) >= num_groups:
        group_of = _runs([sizes[node] for node in order], num_groups)
        return [group_of[order.index(node)] for node in nodes]
    shares = dict.fromkeys(order, 1)
    for _ in range(num_groups - len(order)):
        shares[max(order, key=lambda node: sizes[node] / shares[node])] += 1
    first = dict(zip(order, accumulate(shares.values(), initial=0), strict=False))
    seen: Counter[_Node] = Counter()
    found = []
    for node in nodes:
        found.append(first[node] + seen[node] % shares[node])
        seen[node] += 1
    return found


def _runs(sizes: Sequence[int], num_groups: int) -> list[int]:
    """Cut a row into runs of about one sum, none empty; returns the run of each place."""
    ends, total = list(accumulate(sizes)), sum(sizes)
    cuts = [0]
    for group in range(1, num_groups):
        wanted = total * group / num_groups
        choices = range(cuts[-1] + 1, len(sizes) - num_groups + group + 1)
        cuts.append(min(choices, key=lambda cut: abs(ends[cut - 1] - wanted)))
    cuts.append(len(sizes))
    return [group for group in range(num_groups) for _ in range(cuts[group], cuts[group + 1])]


def homes(nodes: Sequence[Where], num_groups: int) -> list[Where]:
    """Of each group the node that most of its members are on."""
    groups = groups_of_near(nodes, num_groups)
    counted = [
        Counter(node for node, of in zip(nodes, groups, strict=True) if of == group) for group in range(num_groups)
    ]
    return [max(sorted(count), key=count.__getitem__, default=NOWHERE) for count in counted]
