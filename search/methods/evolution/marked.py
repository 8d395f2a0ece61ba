"""Graphs of nodes with choices, which begin with one node and grow, with historical marks: the genomes of DeepNEAT.

R. Miikkulainen et al., "Evolving Deep Neural Networks", 2017, section 3.1: a node is a layer with a table of choices,
not a unit, and a connection has no weight; all else is as in NEAT (K. O. Stanley and R. Miikkulainen, "Evolving Neural
Networks through Augmenting Topologies", 2002, section 3). A genome is `{"nodes": [[mark, {choice: option}], ...],
"connections": [[mark, source, target, is_enabled], ...]}`. Nodes without a source take the graph's input, and those
that no other node takes are its output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter
from typing import Any

import numpy as np

from orchestray.platform.errors import ConfigError
from orchestray.search.spaces.architectures.choices import ChoiceSpace
from orchestray.search.spaces.architectures.topology import Innovations, reaches

MarkedGenome = dict[str, Any]

_INPUT, _OUTPUT = -1, -2
"""Numbers of a graph's input and output, as ends of connections that can be split."""
_NODE_BELOW, _CONNECTION_BELOW = 0.2, 0.4
"""Draws below which a mutation adds a node, and a connection; the others change a choice."""
_TRIES = 20


class MarkedGraphs:
    """The graphs of blueprints or of modules that a search has seen, and the operators of NEAT on them.

    It stores the historical marks, so each search needs one of its own.
    """

    def __init__(self, parts: ChoiceSpace, count: str) -> None:
        """
        Args:
            parts: space of the parts. Its choices are the number of nodes, and `<node>.<choice>` for each node from 1.
                `<a>-<b>` is 1 if b takes a.
            count: name of the choice of the number of nodes.
        """
        self.parts, self.count = parts, count
        asked = {made.name: made.options for made in parts.decide(lambda _name, _options: 0)}
        self.max_nodes = max(asked[count])
        self.options = {name.removeprefix("1."): options for name, options in asked.items() if name.startswith("1.")}
        """Options of each choice of a node."""
        self.innovations = Innovations(1)

    def sample(self, rng: np.random.Generator) -> MarkedGenome:
        """Draw a graph of one node: structure is added only by mutations."""
        chosen = {name: options[int(rng.integers(len(options)))] for name, options in self.options.items()}
        return {"nodes": [[0, chosen]], "connections": []}

    def mutate(self, genome: MarkedGenome, rng: np.random.Generator) -> MarkedGenome:
        """Add a node or a connection or, mostly and where nothing can be added, change a choice of a node."""
        draw, mutant = rng.random(), genome
        if draw < _NODE_BELOW:
            mutant = self.with_node(genome, rng)
        elif draw < _CONNECTION_BELOW:
            mutant = self.with_connection(genome, rng)
        return self.with_choice(genome, rng) if mutant == genome else mutant

    def with_node(self, genome: MarkedGenome, rng: np.random.Generator) -> MarkedGenome:
        """Split a connection, also one from the graph's input or to its output, by a node of random choices."""
        if len(genome["nodes"]) >= self.max_nodes:
            return genome
        places = _enabled(genome)
        sources, targets = {source for source, _ in places}, {target for _, target in places}
        numbers = [number for number, _ in genome["nodes"]]
        places += [(_INPUT, number) for number in numbers if number not in targets]
        places += [(number, _OUTPUT) for number in numbers if number not in sources]
        source, target = places[int(rng.integers(len(places)))]
        split, repeat = self.innovations.connection(source, target), 0
        while (node := self.innovations.node(split, repeat)) in numbers:
            repeat += 1
        chosen = self.sample(rng)["nodes"][0][1]
        kept = [[*gene[:3], gene[3] and (gene[1], gene[2]) != (source, target)] for gene in genome["connections"]]
        kept += [self._gene(source, node)] if source != _INPUT else []
        kept += [self._gene(node, target)] if target != _OUTPUT else []
        return {"nodes": sorted([*genome["nodes"], [node, chosen]], key=_mark), "connections": sorted(kept, key=_mark)}

    def with_connection(self, genome: MarkedGenome, rng: np.random.Generator) -> MarkedGenome:
        """Add or re-enable one connection, without closing a cycle."""
        numbers = [number for number, _ in genome["nodes"]]
        there = {(gene[1], gene[2]): gene for gene in genome["connections"]}
        for _ in range(_TRIES):
            source, target = (numbers[int(rng.integers(len(numbers)))] for _ in range(2))
            gene = there.get((source, target))
            if (gene is not None and gene[3]) or source == target or reaches(genome, target, source):
                continue
            others = [other for other in genome["connections"] if other is not gene]
            added = self._gene(source, target)
            return {"nodes": genome["nodes"], "connections": sorted([*others, added], key=_mark)}
        return genome

    def with_choice(self, genome: MarkedGenome, rng: np.random.Generator) -> MarkedGenome:
        """Give one choice of one node another option."""
        names = [name for name, options in self.options.items() if len(options) > 1]
        if not names:
            return genome
        place, name = int(rng.integers(len(genome["nodes"]))), names[int(rng.integers(len(names)))]
        number, chosen = genome["nodes"][place]
        others = [option for option in self.options[name] if option != chosen[name]]
        changed = [number, {**chosen, name: others[int(rng.integers(len(others)))]}]
        return {**genome, "nodes": [*genome["nodes"][:place], changed, *genome["nodes"][place + 1 :]]}

    def crossover(self, a: MarkedGenome, b: MarkedGenome, rng: np.random.Generator) -> MarkedGenome:
        """Combine two graphs by their marks; what only the fitter parent `a` has comes from `a`.

        The choices of a node that both have come from either parent, each by itself. A connection that is disabled in
        one parent is enabled in the child with probability 1/4.
        """
        of_b = dict(b["nodes"])
        nodes = []
        for number, chosen in a["nodes"]:
            other = of_b.get(number, chosen)
            nodes.append([number, {name: (chosen if rng.random() < 0.5 else other)[name] for name in chosen}])
        genes = {gene[0]: gene for gene in b["connections"]}
        connections = []
        for gene in a["connections"]:
            is_both = gene[3] and genes.get(gene[0], gene)[3]
            connections.append([*gene[:3], bool(is_both or rng.random() < 0.25)])
        return {"nodes": nodes, "connections": connections}

    def distance(self, a: MarkedGenome, b: MarkedGenome) -> float:
        """Return the compatibility distance: the part of genes that only one has, plus the part of choices that differ
        in nodes that both have.
        """
        lacking = total = 0
        for kind in ("nodes", "connections"):
            ours, theirs = ({gene[0] for gene in one[kind]} for one in (a, b))
            lacking, total = lacking + len(ours ^ theirs), total + max(len(ours), len(theirs))
        of_b = dict(b["nodes"])
        both = [(chosen, of_b[number]) for number, chosen in a["nodes"] if number in of_b]
        differing = [one[name] != other[name] for one, other in both for name in one]
        return lacking / total + (sum(differing) / len(differing) if differing else 0.0)

    def choices_of(self, genome: MarkedGenome) -> Mapping[str, Any]:
        """Return the choices of the space of parts that make this graph."""
        edges = _enabled(genome)
        nodes = dict(genome["nodes"])
        order = list(TopologicalSorter({n: [s for s, t in edges if t == n] for n in nodes}).static_order())
        place = {number: index + 1 for index, number in enumerate(order)}
        drawn = {f"{place[source]}-{place[target]}" for source, target in edges}
        made: dict[str, Any] = {}

        def choose(name: str, _options: Sequence[Any]) -> Any:
            number, _, choice = name.partition(".")
            if name == self.count:
                made[name] = len(order)
            elif choice:
                made[name] = nodes[order[int(number) - 1]][choice]
            else:
                made[name] = int(name in drawn)
            return made[name]

        self.parts.compose(choose)
        return made

    def build(self, genome: MarkedGenome, input_shape: Sequence[int], num_outputs: int) -> Any:
        """Refuse: a part is not a network by itself."""
        raise ConfigError("a blueprint or a module is only a part of a network: put them together by `assemble`")

    def _gene(self, source: int, target: int) -> list[Any]:
        return [self.innovations.connection(source, target), source, target, True]


def _enabled(genome: MarkedGenome) -> list[tuple[int, int]]:
    """Return source and target of each enabled connection."""
    return [(gene[1], gene[2]) for gene in genome["connections"] if gene[3]]


def _mark(gene: Sequence[Any]) -> int:
    return int(gene[0])
