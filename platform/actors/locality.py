"""Division of members into groups that are near each other; pure functions of the members' nodes."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

Where = tuple[int, str]
"""Node: its address as a number, so that the machines of one subnet sort next to each other, and its Ray id."""
NOWHERE: Where = (0, "")
"""Unknown node."""
_Node = TypeVar("_Node", bound="int | Where")


def groups_of_near(nodes: Sequence[_Node], num_groups: int) -> list[int]:
    """Return the group of each member, so that groups have similar sizes and span as few nodes as possible.

    With at least as many nodes as groups, every node belongs to one group, and a group consists of consecutive nodes in
    sorted order. Machines with neighbouring addresses thus share a group. With fewer nodes, no group spans two nodes,
    and the members of a node are dealt to its groups in turn.

    Args:
        nodes: node of each member.
        num_groups: number of groups; some may be empty if there are fewer members.
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
    """Cut a sequence into non-empty runs of about equal sum, and return the run of each element."""
    ends, total = list(accumulate(sizes)), sum(sizes)
    cuts = [0]
    for group in range(1, num_groups):
        wanted = total * group / num_groups
        choices = range(cuts[-1] + 1, len(sizes) - num_groups + group + 1)
        cuts.append(min(choices, key=lambda cut: abs(ends[cut - 1] - wanted)))
    cuts.append(len(sizes))
    return [group for group in range(num_groups) for _ in range(cuts[group], cuts[group + 1])]


def homes(nodes: Sequence[Where], num_groups: int) -> list[Where]:
    """Return, for each group, the node that holds most of its members."""
    groups = groups_of_near(nodes, num_groups)
    counted = [
        Counter(node for node, of in zip(nodes, groups, strict=True) if of == group) for group in range(num_groups)
    ]
    return [max(sorted(count), key=count.__getitem__, default=NOWHERE) for count in counted]
