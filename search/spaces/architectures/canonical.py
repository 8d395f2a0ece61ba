"""The canonical form of a network: a key that isomorphic graphs share, and only those.

Node colours are refined by the colours of their inputs and users until nothing changes (B. Weisfeiler, A. Leman, 1968).
Where nodes still have the same colour, one of them is given its own and the refinement continues, as in B. McKay,
"Practical graph isomorphism", 1981. A branch is pruned if its first leaf equals that of a visited branch, or if a
permutation of nodes maps one to the other: both lead to the same result. The smallest certificate found is the
canonical form.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from orchestray.search.spaces.architectures.plan import Plan

Certificate = tuple[tuple[str, tuple[int, ...]], ...]
"""Nodes in canonical order, each with its label and the positions of its inputs."""


def key_of_plan(plan: Plan) -> str:
    """Return a key that two plans share exactly if they describe the same network.

    The order of steps, of summands and of concatenated channels (and hence of weights) does not matter.
    """
    labels = ["input", *(f"{step.kind} {step.arguments}" for step in plan.steps)]
    inputs: list[tuple[int, ...]] = [(), *(step.inputs for step in plan.steps)]
    return hashlib.sha256(repr(canonical(labels, inputs)).encode()).hexdigest()[:32]


def canonical(labels: Sequence[str], inputs: Sequence[Sequence[int]]) -> Certificate:
    """Return the canonical form of a labelled graph.

    Args:
        labels: label of each node.
        inputs: nodes that each node uses, all of them before it; one that is used twice is listed twice. Their order
            does not matter.
    """
    return _Search(labels, inputs).smallest()


class _Search:
    def __init__(self, labels: Sequence[str], inputs: Sequence[Sequence[int]]) -> None:
        self.labels = labels
        self.inputs = inputs
        self.users: list[list[int]] = [[] for _ in labels]
        for node, used in enumerate(inputs):
            for value in used:
                self.users[value].append(node)

    def smallest(self) -> Certificate:
        rank = {label: place for place, label in enumerate(sorted(set(self.labels)))}
        return self._descend(self._refined([rank[label] for label in self.labels]))

    def _descend(self, colours: list[int]) -> Certificate:
        """Return the smallest certificate over all ways to break ties between nodes of one colour."""
        alike = self._first_class(colours)
        while alike and self._are_twins(alike):
            colours = self._refined(self._all_apart(colours, alike))
            alike = self._first_class(colours)
        if not alike:
            return self._certificate(colours)
        branches: list[list[int]] = []
        for node in alike:
            told_apart = self._refined(self._apart(colours, node))
            if not any(self._is_image(other, told_apart) for other in branches):
                branches.append(told_apart)
        if len(branches) == 1:
            return self._descend(branches[0])
        by_leaf = {self._first_leaf(branch): branch for branch in branches}
        return min(self._descend(branch) for branch in by_leaf.values())

    def _are_twins(self, nodes: Sequence[int]) -> bool:
        """Return True if nodes of one colour have the same inputs and users, so that their order does not matter."""
        first = nodes[0]
        return all(
            sorted(self.inputs[node]) == sorted(self.inputs[first]) and self.users[node] == self.users[first]
            for node in nodes[1:]
        )

    def _is_image(self, a: Sequence[int], b: Sequence[int]) -> bool:
        """Return True if an automorphism mapping the colours `a` to the colours `b` is found.

        Only the likeliest mapping is tried, which leaves as many nodes as possible in place: it finds swaps of two
        equal branches.
        """
        classes: tuple[dict[int, list[int]], dict[int, list[int]]] = ({}, {})
        for colours, of_colour in zip((a, b), classes, strict=True):
            for node, colour in enumerate(colours):
                of_colour.setdefault(colour, []).append(node)
        if {c: len(nodes) for c, nodes in classes[0].items()} != {c: len(nodes) for c, nodes in classes[1].items()}:
            return False
        image = list(range(len(a)))
        for colour, nodes in classes[0].items():
            staying = set(nodes) & set(classes[1][colour])
            others = [node for node in classes[1][colour] if node not in staying]
            for node, to in zip([node for node in nodes if node not in staying], others, strict=True):
                image[node] = to
        return all(
            self.labels[node] == self.labels[to]
            and sorted(image[used] for used in self.inputs[node]) == sorted(self.inputs[to])
            for node, to in enumerate(image)
        )

    def _first_leaf(self, colours: list[int]) -> Certificate:
        while alike := self._first_class(colours):
            colours = self._refined(self._apart(colours, alike[0]))
        return self._certificate(colours)

    def _first_class(self, colours: list[int]) -> list[int]:
        """Return the nodes of the lowest colour that more than one node has."""
        counts = Counter(colours)
        shared = [colour for colour, count in counts.items() if count > 1]
        if not shared:
            return []
        lowest = min(shared)
        return [node for node, colour in enumerate(colours) if colour == lowest]

    def _apart(self, colours: list[int], node: int) -> list[int]:
        doubled = [2 * colour + 1 for colour in colours]
        doubled[node] -= 1
        return doubled

    def _all_apart(self, colours: list[int], nodes: Sequence[int]) -> list[int]:
        spread = [colour * len(colours) for colour in colours]
        for place, node in enumerate(nodes):
            spread[node] += place
        return spread

    def _refined(self, colours: list[int]) -> list[int]:
        """Return colours refined as far as neighbourhoods distinguish nodes; numbered from 0, independent of node
        order.
        """
        colours = _ranked(colours)
        while True:
            count = max(colours) + 1
            colours = self._swept(colours, range(len(colours)), self.inputs)
            colours = self._swept(colours, range(len(colours) - 1, -1, -1), self.users)
            if max(colours) + 1 == count:
                return colours

    def _swept(self, colours: list[int], order: range, neighbours: Sequence[Sequence[int]]) -> list[int]:
        """Return the colours after one pass along the graph, which gives each node those of all nodes before it."""
        heard = [b""] * len(colours)
        for node in order:
            around = b"".join(sorted(heard[other] for other in neighbours[node]))
            heard[node] = hashlib.blake2b(colours[node].to_bytes(4, "big") + around, digest_size=16).digest()
        return _ranked(list(zip(colours, heard, strict=True)))

    def _certificate(self, colours: list[int]) -> Certificate:
        at = sorted(range(len(colours)), key=colours.__getitem__)
        return tuple((self.labels[node], tuple(sorted(colours[used] for used in self.inputs[node]))) for node in at)


def _ranked(values: Sequence[Any]) -> list[int]:
    """Return the rank of each value among the distinct ones, which does not depend on the order of the nodes."""
    rank = {value: place for place, value in enumerate(sorted(set(values)))}
    return [rank[value] for value in values]
