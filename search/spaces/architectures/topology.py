"""Feed-forward networks of single nodes and weighted connections, with historical marks: the genomes of NEAT.

K. O. Stanley and R. Miikkulainen, "Evolving Neural Networks through Augmenting Topologies", Evolutionary Computation
10(2), 2002, section 3.1. A genome is `{"nodes": [[number, activation], ...], "connections": [[innovation, source,
target, weight, is_enabled], ...]}`: the hidden nodes, and the connections by their innovation numbers. Nodes 0 to
inputs - 1 are the inputs, followed by the bias and the outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from orchestray.platform.errors import ConfigError
from orchestray.search.spaces.architectures.activation import ACTIVATIONS, Layers, activate
from orchestray.search.spaces.architectures.base import BuiltInSpace, Graph, Node, plain_key
from orchestray.search.spaces.architectures.topology_form import form_of

if TYPE_CHECKING:
    from torch import nn

TopologyGenome = dict[str, Any]


class Innovations:
    """A registry of historical marks: equal structural changes get the same number anywhere in a search."""

    def __init__(self, num_nodes: int) -> None:
        self._connections: dict[tuple[int, int], int] = {}
        self._nodes: dict[tuple[int, int], int] = {}
        self._num_nodes = num_nodes

    def connection(self, source: int, target: int) -> int:
        """Return the innovation number of a connection."""
        return self._connections.setdefault((source, target), len(self._connections))

    def node(self, split: int, repeat: int) -> int:
        """Return the number of the node that splits a connection for the `repeat`-th time in one genome."""
        known = self._nodes.get((split, repeat))
        if known is None:
            known = self._nodes[split, repeat] = self._num_nodes
            self._num_nodes += 1
        return known


class Topology(BuiltInSpace):
    """A space of networks that start with every input connected to every output, and grow.

    The space stores the historical marks, so each search needs a space of its own.
    """

    def __init__(
        self,
        *,
        inputs: int,
        outputs: int,
        activations: Sequence[str] = ("sigmoid",),
        output: str = "linear",
        weight_scale: float = 1.0,
        step_scale: float = 0.5,
    ) -> None:
        """
        Args:
            inputs: number of values of a sample.
            outputs: number of outputs of the network.
            activations: options for the activation of a new node: "sigmoid" (steepened: 4.9 x), "tanh", "relu", "sine",
                "gaussian", "absolute", "linear".
            output: activation of the outputs.
            weight_scale: standard deviation of a new weight.
            step_scale: standard deviation of a weight's change.
        """
        unknown = [name for name in (*activations, output) if name not in ACTIVATIONS]
        if unknown or not activations:
            raise ConfigError(
                f"search.architecture.activations: there are {', '.join(ACTIVATIONS)}, "
                f"got {', '.join(unknown) or 'none'}"
            )
        if inputs < 1 or outputs < 1:
            raise ConfigError(f"search.architecture: inputs and outputs must be at least 1, got {inputs} and {outputs}")
        self.inputs, self.outputs = inputs, outputs
        self.activations, self.output = tuple(activations), output
        self.weight_scale, self.step_scale = weight_scale, step_scale
        self.first_output = inputs + 1
        self.first_hidden = self.first_output + outputs
        self.innovations = Innovations(self.first_hidden)

    def sample(self, rng: np.random.Generator) -> TopologyGenome:
        weights = iter((self.weight_scale * rng.standard_normal((self.inputs + 1) * self.outputs)).tolist())
        connections = [
            [self.innovations.connection(source, target), source, target, next(weights), True]
            for source in range(self.inputs + 1)
            for target in range(self.first_output, self.first_hidden)
        ]
        return {"nodes": [], "connections": sorted(connections)}

    def mutate(self, genome: TopologyGenome, rng: np.random.Generator) -> TopologyGenome:
        """Add a connection or a node or, mostly and where nothing can be added, change the weights."""
        draw, mutant = rng.random(), genome
        if draw < 0.1:
            mutant = self.with_node(genome, rng)
        elif draw < 0.3:
            mutant = self.with_connection(genome, rng)
        return self.with_weights(genome, rng) if mutant == genome else mutant

    def key(self, genome: TopologyGenome) -> str:
        """Return a key that two genomes share exactly if their networks and weights are isomorphic.

        The numbers of hidden nodes do not matter. Disabled connections and nodes that lead to no output are ignored.
        """
        into: dict[int, list[tuple[int, float]]] = {}
        for _, source, target, weight, is_enabled in genome["connections"]:
            if is_enabled:
                into.setdefault(target, []).append((source, weight))
        return plain_key(form_of(into, dict(genome["nodes"]), range(self.first_output, self.first_hidden)))

    def with_weights(self, genome: TopologyGenome, rng: np.random.Generator) -> TopologyGenome:
        """Perturb each weight with probability 0.9, otherwise draw a new one."""
        num = len(genome["connections"])
        steps = self.step_scale * rng.standard_normal(num)
        fresh = self.weight_scale * 2 * rng.standard_normal(num)
        weights = np.array([gene[3] for gene in genome["connections"]])
        moved = np.where(rng.random(num) < 0.9, weights + steps, fresh)
        connections = [
            [*gene[:3], weight, gene[4]] for gene, weight in zip(genome["connections"], moved.tolist(), strict=True)
        ]
        return {"nodes": genome["nodes"], "connections": connections}

    def with_connection(self, genome: TopologyGenome, rng: np.random.Generator) -> TopologyGenome:
        """Add or re-enable one connection, without closing a cycle."""
        hidden = [node for node, _ in genome["nodes"]]
        sources = [*range(self.inputs + 1), *hidden]
        targets = [*range(self.first_output, self.first_hidden), *hidden]
        there = {(gene[1], gene[2]): index for index, gene in enumerate(genome["connections"])}
        for _ in range(20):
            source, target = sources[int(rng.integers(len(sources)))], targets[int(rng.integers(len(targets)))]
            index = there.get((source, target))
            if index is not None and not genome["connections"][index][4]:
                connections = [list(gene) for gene in genome["connections"]]
                connections[index][4] = True
                return {"nodes": genome["nodes"], "connections": connections}
            if index is None and not reaches(genome, target, source):
                weight = float(self.weight_scale * rng.standard_normal())
                gene = [self.innovations.connection(source, target), source, target, weight, True]
                return {"nodes": genome["nodes"], "connections": sorted([*genome["connections"], gene])}
        return genome

    def with_node(self, genome: TopologyGenome, rng: np.random.Generator) -> TopologyGenome:
        """Split a connection by a new node: into it with weight 1, out of it with the old weight."""
        enabled = [index for index, gene in enumerate(genome["connections"]) if gene[4]]
        if not enabled:
            return genome
        connections = [list(gene) for gene in genome["connections"]]
        split = connections[enabled[int(rng.integers(len(enabled)))]]
        split[4] = False
        taken = {node for node, _ in genome["nodes"]}
        repeat = 0
        while (node := self.innovations.node(split[0], repeat)) in taken:
            repeat += 1
        activation = self.activations[int(rng.integers(len(self.activations)))]
        connections += [
            [self.innovations.connection(split[1], node), split[1], node, 1.0, True],
            [self.innovations.connection(node, split[2]), node, split[2], split[3], True],
        ]
        return {"nodes": sorted([*genome["nodes"], [node, activation]]), "connections": sorted(connections)}

    def crossover(self, a: TopologyGenome, b: TopologyGenome, rng: np.random.Generator) -> TopologyGenome:
        """Combine two genomes by innovation number; genes that only the fitter parent `a` has come from `a`.

        Genes that both have come from either parent. A gene that is disabled in one parent is enabled in the child with
        probability 1/4. The child has the structure of `a`, which has no cycle.
        """
        others = {gene[0]: gene for gene in b["connections"]}
        draws = rng.random((len(a["connections"]), 2)).tolist()
        connections = []
        for gene, (which, switch) in zip(a["connections"], draws, strict=True):
            other = others.get(gene[0], gene)
            weight = (gene if which < 0.5 else other)[3]
            is_enabled = switch >= 0.75 if not (gene[4] and other[4]) else True
            connections.append([*gene[:3], weight, is_enabled])
        return {"nodes": a["nodes"], "connections": connections}

    def distance(self, a: TopologyGenome, b: TopologyGenome, disjoint_weight: float, weight_weight: float) -> float:
        """Return the compatibility distance of two genomes (equation 1 of the paper).

        It weighs the number of genes that only one has, and the mean weight difference of the genes that both have. The
        former is divided by the size of the larger genome if that is 20 or more.
        """
        ours = {gene[0]: gene[3] for gene in a["connections"]}
        theirs = {gene[0]: gene[3] for gene in b["connections"]}
        shared = ours.keys() & theirs.keys()
        lacking = len(ours) + len(theirs) - 2 * len(shared)
        larger = max(len(ours), len(theirs))
        mean = sum(abs(ours[mark] - theirs[mark]) for mark in shared) / len(shared) if shared else 0.0
        return disjoint_weight * lacking / (larger if larger >= 20 else 1) + weight_weight * mean

    def layers(self, genome: TopologyGenome) -> Layers:
        """Return the network as layers of nodes that do not depend on each other."""
        kinds = dict.fromkeys(range(self.first_output, self.first_hidden), self.output)
        kinds.update(dict(genome["nodes"]))
        enabled = [gene for gene in genome["connections"] if gene[4]]
        return Layers.of(self.inputs + 1, self.outputs, kinds, [(gene[1], gene[2], gene[3]) for gene in enabled])

    def outputs_of(self, genome: TopologyGenome, inputs: np.ndarray) -> np.ndarray:
        """Return the network's outputs [samples, outputs] for inputs [samples, inputs], in float64."""
        return activate(self.layers(genome), inputs)

    def build(self, genome: TopologyGenome, input_shape: Sequence[int], num_outputs: int) -> nn.Module:
        """Return the network with the genome's own weights; inputs of any shape are flattened."""
        from orchestray.search.spaces.architectures.activation_network import LayersNetwork

        if prod(input_shape) != self.inputs or num_outputs != self.outputs:
            raise ConfigError(
                f"search.architecture: the task has {prod(input_shape)} inputs and {num_outputs} outputs, and the "
                f"space {self.inputs} and {self.outputs}: give inputs: {prod(input_shape)}, outputs: {num_outputs}"
            )
        return LayersNetwork(self.layers(genome))

    def text(self, genome: TopologyGenome) -> str:
        hidden, enabled = len(genome["nodes"]), sum(bool(connection[4]) for connection in genome["connections"])
        return f"{hidden} hidden nodes, {enabled} connections"

    def graph(self, genome: TopologyGenome) -> Graph:
        layers = self.layers(genome)
        place = {number: index for index, number in enumerate(layers.numbers)}
        labels = {number: f"in {number}" for number in range(self.inputs)} | {self.inputs: "bias"}
        labels.update({number: kind for number, kind in zip(layers.numbers, layers.kinds, strict=True) if kind})
        nodes = tuple(Node(str(number), labels[number]) for number in layers.numbers)
        edges = [(place[g[1]], place[g[2]]) for g in genome["connections"] if g[4] and g[1] in place and g[2] in place]
        return Graph(nodes, tuple(edges))


def reaches(genome: TopologyGenome, start: int, goal: int) -> bool:
    """Return True if connections, including disabled ones (which may be re-enabled), lead from `start` to `goal`."""
    follow: dict[int, list[int]] = {}
    for gene in genome["connections"]:
        follow.setdefault(gene[1], []).append(gene[2])
    seen, ahead = {start}, [start]
    while ahead:
        node = ahead.pop()
        if node == goal:
            return True
        new = [after for after in follow.get(node, ()) if after not in seen]
        seen.update(new)
        ahead += new
    return False
