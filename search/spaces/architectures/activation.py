"""A network of single nodes, arranged in layers, and its forward pass in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

Activation = Callable[[np.ndarray], np.ndarray]


def _sigmoid(values: np.ndarray) -> np.ndarray:
    """Return the steepened sigmoid of NEAT: 1 / (1 + exp(-4.9 x))."""
    result: np.ndarray = 0.5 + 0.5 * np.tanh(2.45 * values)
    return result


ACTIVATIONS: Mapping[str, Activation] = {
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "relu": lambda values: np.maximum(values, 0.0),
    "sine": np.sin,
    "gaussian": lambda values: np.exp(-(values**2)),
    "absolute": np.abs,
    "linear": lambda values: values,
}
"""Maps the name of an activation to the function that a node applies to the sum of its inputs."""


@dataclass(frozen=True)
class Layers:
    """Nodes in topological order, grouped into layers whose nodes do not depend on each other."""

    numbers: tuple[int, ...]
    """Node at each position: the inputs, the bias, then the others layer by layer, without unused nodes."""
    kinds: tuple[str, ...]
    """Activation at each position; empty for inputs and bias."""
    num_inputs: int
    """Number of inputs without the bias."""
    layers: tuple[tuple[int, int], ...]
    """First and end position of each layer."""
    weights: np.ndarray
    """[positions, positions]: from a row's node to a column's; 0 if they are not connected."""
    connected: np.ndarray
    """[connections, 2]: positions of the source and the target of each connection."""
    outputs: tuple[int, ...]
    """Positions of the outputs, in order."""

    @classmethod
    def of(
        cls,
        num_sources: int,
        num_outputs: int,
        kinds: Mapping[int, str],
        connections: Sequence[tuple[int, int, float]],
    ) -> Layers:
        """Arrange nodes in layers.

        Args:
            num_sources: number of inputs plus bias; they are the nodes 0 to num_sources - 1.
            num_outputs: number of outputs, which are the nodes after these.
            kinds: activation of every other node.
            connections: source, target and weight of each; they must not form a cycle.
        """
        outputs = range(num_sources, num_sources + num_outputs)
        into: dict[int, list[int]] = {}
        for source, target, _ in connections:
            into.setdefault(target, []).append(source)
        needed, ahead = set(outputs), list(outputs)
        while ahead:
            new = [source for source in into.get(ahead.pop(), ()) if source not in needed]
            needed.update(new)
            ahead += new
        depth = dict.fromkeys(range(num_sources), 0)

        def depth_of(node: int) -> int:
            if node not in depth:
                depth[node] = 1 + max((depth_of(source) for source in into.get(node, ())), default=0)
            return depth[node]

        others = sorted((node for node in needed if node >= num_sources), key=lambda node: (depth_of(node), node))
        numbers = (*range(num_sources), *others)
        place = {number: index for index, number in enumerate(numbers)}
        used = [(place[s], place[t], w) for s, t, w in connections if s in place and t in place]
        weights = np.zeros((len(numbers), len(numbers)))
        for source, target, weight in used:
            weights[source, target] = weight
        depths = [depth[node] for node in others]
        starts = [index for index, at in enumerate(depths) if index == 0 or at != depths[index - 1]]
        bounds = [num_sources + start for start in starts] + [len(numbers)]
        return cls(
            numbers,
            ("",) * num_sources + tuple(kinds[node] for node in others),
            num_sources - 1,
            tuple(pairwise(bounds)),
            weights,
            np.array([(source, target) for source, target, _ in used], dtype=np.int64).reshape(-1, 2),
            tuple(place[output] for output in outputs),
        )

    def groups(self, start: int, end: int) -> dict[str, list[int]]:
        """Return the positions of a layer's nodes, by activation."""
        found: dict[str, list[int]] = {}
        for place in range(start, end):
            found.setdefault(self.kinds[place], []).append(place)
        return found


def activate(layers: Layers, inputs: np.ndarray) -> np.ndarray:
    """Compute the outputs [samples, outputs] for inputs [samples, inputs]."""
    values = np.zeros((len(inputs), len(layers.numbers)))
    values[:, : layers.num_inputs] = inputs
    values[:, layers.num_inputs] = 1.0
    for start, end in layers.layers:
        for kind, places in layers.groups(start, end).items():
            values[:, places] = ACTIVATIONS[kind](values[:, :start] @ layers.weights[:start, places])
    return values[:, layers.outputs]
