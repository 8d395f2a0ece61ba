"""A parameter server's weights in a worker's memory that is too small for all of them (GeePS, Cui et al. 2016)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.trainers.survey.lab.exhibit import Exhibit
from orchestray.trainers.survey.lab.timing import seeded

_LR = 0.1
_SAMPLES, _CLASSES, _STEPS = 32, 10, 8
_WIDTHS = (64, 256, 192, 128, 96, _CLASSES)


class ParameterCache:
    """The blocks of weights that a worker holds, at most some bytes of them; a server holds all.

    A block is pinned while a layer computes with it. If another does not fit beside those that are held, the ones not
    pinned are dropped, the one used longest ago first. Nothing is lost with them: updates go to the server at once.
    """

    def __init__(self, server: Mapping[str, Tensor], most_bytes: int) -> None:
        """
        Args:
            server: all blocks by name; they are updated in place.
            most_bytes: most bytes of blocks that are held.
        """
        self._server, self._most_bytes = server, most_bytes
        self._held: dict[str, Tensor] = {}
        """The least recently used first."""
        self._pinned: set[str] = set()
        self.peak_bytes = 0
        self.num_fetched = 0
        self.bytes_fetched = 0

    @property
    def held_bytes(self) -> int:
        return sum(block.nbytes for block in self._held.values())

    @contextmanager
    def pinned(self, *names: str) -> Iterator[list[Tensor]]:
        """Hold some blocks inside, and yield them.

        Raises:
            ValueError: they do not fit together.
        """
        needed = sum(self._server[name].nbytes for name in names)
        if needed > self._most_bytes:
            raise ValueError(f"{', '.join(names)} take {needed:,} bytes, and the cache has {self._most_bytes:,}")
        self._pinned.update(names)
        try:
            yield [self._fetched(name) for name in names]
        finally:
            self._pinned.difference_update(names)

    def update(self, name: str, change: Tensor) -> None:
        """Add a change to a block, at the server and where it is held."""
        self._server[name].add_(change)
        if name in self._held:
            self._held[name].add_(change)

    def _fetched(self, name: str) -> Tensor:
        block = self._held.pop(name, None)
        if block is None:
            whole = self._server[name]
            droppable = [each for each in self._held if each not in self._pinned]
            while self.held_bytes + whole.nbytes > self._most_bytes:
                del self._held[droppable.pop(0)]
            block = whole.clone()
            self.num_fetched += 1
            self.bytes_fetched += block.nbytes
        self._held[name] = block
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return block


class LayerByLayer:
    """A network of fully connected layers that is trained with only one layer's weights at hand at a time."""

    def __init__(self, cache: ParameterCache, num_layers: int) -> None:
        """
        Args:
            cache: its weights: `<n>.weight` and `<n>.bias` of layer n.
            num_layers: number of layers; tanh stands between them.
        """
        self._cache = cache
        self._names = [(f"{index}.weight", f"{index}.bias") for index in range(num_layers)]

    def step(self, x: Tensor, y: Tensor, lr: float) -> None:
        """Make a step of SGD.

        Args:
            x: inputs, [samples, inputs].
            y: classes, [samples].
            lr: rate.
        """
        inputs = [x]
        with torch.no_grad():
            for index, names in enumerate(self._names):
                with self._cache.pinned(*names) as blocks:
                    inputs.append(self._forward(index, inputs[-1], blocks))
        outputs = inputs.pop().requires_grad_()
        (error,) = torch.autograd.grad(functional.cross_entropy(outputs, y), outputs)
        for index, names in reversed(list(enumerate(self._names))):
            with self._cache.pinned(*names) as blocks:
                given = [each.detach().requires_grad_() for each in (inputs.pop(), *blocks)]
                again = self._forward(index, given[0], given[1:])
                error, *gradients = torch.autograd.grad(again, given, error)
                for name, gradient in zip(names, gradients, strict=True):
                    self._cache.update(name, -lr * gradient)

    def _forward(self, index: int, x: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        return functional.linear(torch.tanh(x) if index else x, *blocks)


def parameter_cache(rounds: int = 0, widths: Sequence[int] = _WIDTHS, steps: int = _STEPS) -> Exhibit:
    """Train with caches of several sizes, beside torch with all weights in memory.

    Args:
        rounds: unused: nothing is timed.
        widths: inputs, widths of the layers, and classes.
        steps: steps of SGD.
    """
    del rounds
    x, y = seeded(_SAMPLES, widths[0]).double(), torch.arange(_SAMPLES) % widths[-1]
    before = _weights(widths)
    exact = _plain(before, x, y, steps)
    layers = [before[f"{n}.weight"].nbytes + before[f"{n}.bias"].nbytes for n in range(len(widths) - 1)]
    whole = sum(layers)
    rows: list[list[Any]] = []
    sizes = {"largest layer": max(layers), "half": whole // 2, "nine tenths": whole * 9 // 10, "all": whole}
    for name, size in sizes.items():
        server = {block: value.clone() for block, value in before.items()}
        cache = ParameterCache(server, max(size, *layers))
        network = LayerByLayer(cache, len(layers))
        for _ in range(steps):
            network.step(x, y, _LR)
        apart = max(float((server[block] - exact[block]).abs().max()) for block in server)
        moved = cache.bytes_fetched / steps
        rows.append([name, size / whole, cache.peak_bytes / whole, cache.num_fetched / steps, moved / whole, apart])
    findings = [
        f"With {rows[0][2]:.0%} of the memory the weights are the same; {rows[0][4]:.2g} models are fetched a step.",
        "With memory for all, each weight is fetched once in the training.",
    ]
    columns = ["memory", "of the model", "peak", "blocks fetched a step", "models fetched a step", "difference"]
    return Exhibit("parameter-cache", "Weights in a memory too small for them", columns, rows, findings)


def _weights(widths: Sequence[int]) -> dict[str, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.ModuleList([nn.Linear(*sizes) for sizes in pairwise(widths)]).double()
    return {name: value.detach().clone() for name, value in layers.named_parameters()}


def _plain(before: Mapping[str, Tensor], x: Tensor, y: Tensor, steps: int) -> dict[str, Tensor]:
    """Return the weights after steps of torch's own SGD."""
    weights = {name: value.clone().requires_grad_() for name, value in before.items()}
    optimizer = torch.optim.SGD(weights.values(), lr=_LR)
    for _ in range(steps):
        hidden = x
        for index in range(len(before) // 2):
            hidden = functional.linear(
                torch.tanh(hidden) if index else hidden, weights[f"{index}.weight"], weights[f"{index}.bias"]
            )
        optimizer.zero_grad()
        torch.autograd.backward(functional.cross_entropy(hidden, y))
        optimizer.step()
    return {name: value.detach() for name, value in weights.items()}
