"""A network of single nodes as layers, and what it answers, in numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

Activation = Callable[[np.ndarray], np.ndarray]


def _sigmoid(values: np.ndarray) -> np.ndarray:
    """The steepened sigmoid of NEAT: 1 / (1 + exp(-4.9 x))."""
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
"""By name, what a node makes of the sum of its inputs."""


@dataclass(frozen=True)
class Layers:
    """Nodes in an order in which inputs come before what uses them, in layers of such as need nothing of their own."""

    numbers: tuple[int, ...]
    """The node at each place: the inputs, the bias, then the others, layer by layer; nodes without use are left out."""
    kinds: tuple[str, ...]
    """The activation of each place; empty for inputs and bias."""
    num_inputs: int
    """Without the bias."""
    layers: tuple[tuple[int, int], ...]
    """From which place to which."""
    weights: np.ndarray
    """[places, places]: from a row's node to a column's; 0 where there is no connection."""
    connected: np.ndarray
    """[connections, 2]: the places of each connection's nodes."""
    outputs: tuple[int, ...]
    """Places of the outputs, in order."""

    @classmethod
    def of(
        cls,
        num_sources: int,
        num_outputs: int,
        kinds: Mapping[int, str],
        connections: Sequence[tuple[int, int, float]],
    ) -> Layers:
        """Put nodes in layers.

        Args:
            num_sources: inputs and bias, the first numbers.
            num_outputs: the numbers after them.
            kinds: activation of every other node.
            connections: source, target and weight of each; they close no cycle.
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
        """Of a layer, the places of each activation."""
        found: dict[str, list[int]] = {}
        for place in range(start, end):
            found.setdefault(self.kinds[place], []).append(place)
        return found


def activate(layers: Layers, inputs: np.ndarray) -> np.ndarray:
    """From [samples, inputs] to [samples, outputs]."""
    values = np.zeros((len(inputs), len(layers.numbers)))
    values[:, : layers.num_inputs] = inputs
    values[:, layers.num_inputs] = 1.0
    for start, end in layers.layers:
        for kind, places in layers.groups(start, end).items():
            values[:, places] = ACTIVATIONS[kind](values[:, :start] @ layers.weights[:start, places])
    return values[:, layers.outputs]
