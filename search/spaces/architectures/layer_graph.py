"""Networks that grow from nothing by mutations: the space of large-scale evolution.

E. Real et al., "Large-Scale Evolution of Image Classifiers", ICML 2017, sections 3.2 and 3.3. A genome is `{"layers":
[{"id", "channels", "kernel", "stride"}, ...], "skips": [[from, to], ...]}`: a sequence of convolutions, and connections
that skip some of them. A layer keeps its id through all mutations, so that its weights can be inherited by name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from orchestray.platform.errors import ConfigError
from orchestray.search.spaces.architectures.base import BuiltInSpace, Genome
from orchestray.search.spaces.architectures.plan import INPUT, Draft, Form, Plan
from orchestray.search.spaces.architectures.planned import PlannedSpace

Layers = dict[str, Any]
_INPUT_ID = 0
"""Id of the network's input in a skip."""


class GrowingSpace(BuiltInSpace):
    """A space with a smallest network and named mutations."""

    @abstractmethod
    def trivial(self) -> Genome:
        """Return the genome of the smallest network."""

    @abstractmethod
    def alter(self, genome: Genome, rng: np.random.Generator) -> tuple[Genome, str]:
        """Return a mutant and the name of the mutation."""

    def mutate(self, genome: Genome, rng: np.random.Generator) -> Genome:
        return self.alter(genome, rng)[0]


class LayerGraph(PlannedSpace, GrowingSpace):
    """A space of convolution sequences with skip connections.

    It has the mutations of the paper that change a network. These are: insert or remove a convolution; alter stride,
    channels or filter size; insert a one-to-one (a 1 x 1 convolution with unchanged channels); add or remove a skip.
    The other mutations of the paper (learning rate, weights, identity) do not concern the network.
    """

    def __init__(
        self,
        *,
        max_layers: int = 12,
        first_channels: int = 8,
        max_channels: int = 64,
        kernels: tuple[int, ...] | list[int] = (1, 3, 5),
        max_halvings: int = 2,
        start_mutations: int = 5,
    ) -> None:
        """
        Args:
            max_layers: maximum number of convolutions.
            first_channels: channels of a convolution inserted at the front.
            max_channels: maximum number of channels of a convolution.
            kernels: filter sizes, odd.
            max_halvings: maximum number of convolutions with stride 2.
            start_mutations: number of mutations that `sample` applies to the smallest network.
        """
        if min(max_layers, first_channels, max_channels, *kernels) < 1 or max_halvings < 0:
            raise ConfigError("search.architecture: layers, channels and kernels must be at least 1, halvings 0")
        if even := [kernel for kernel in kernels if kernel % 2 == 0]:
            raise ConfigError(f"search.architecture.kernels: must be odd, got {', '.join(map(str, even))}")
        self.max_layers, self.first_channels, self.max_channels = max_layers, first_channels, max_channels
        self.kernels, self.max_halvings, self.start_mutations = tuple(kernels), max_halvings, start_mutations

    @property
    def mutations(self) -> Mapping[str, Callable[[Layers, np.random.Generator], Layers | None]]:
        """Mutations by name. Each returns None where it does not apply to the network."""
        return {
            "insert convolution": self._insert_convolution,
            "insert one-to-one": self._insert_one_to_one,
            "remove convolution": self._remove_convolution,
            "alter stride": self._alter_stride,
            "alter channels": self._alter_channels,
            "alter filter size": self._alter_kernel,
            "add skip": self._add_skip,
            "remove skip": self._remove_skip,
        }

    def trivial(self) -> Layers:
        """Return the genome without convolutions: the mean over the image and a linear layer."""
        return {"layers": [], "skips": []}

    def sample(self, rng: np.random.Generator) -> Layers:
        genome = self.trivial()
        for _ in range(self.start_mutations):
            genome = self.mutate(genome, rng)
        return genome

    def alter(self, genome: Genome, rng: np.random.Generator) -> tuple[Layers, str]:
        names = list(self.mutations)
        for index in rng.permutation(len(names)).tolist():
            mutant = self.mutations[names[index]](genome, rng)
            if mutant is not None:
                return mutant, names[index]
        return genome, "nothing"

    def crossover(self, a: Genome, b: Genome, rng: np.random.Generator) -> Layers:
        """Return the first layers of `a` followed by the last of `b`, with the skips that remain intact."""
        cut_a, cut_b = int(rng.integers(len(a["layers"]) + 1)), int(rng.integers(len(b["layers"]) + 1))
        head, tail = a["layers"][:cut_a], b["layers"][cut_b:][: self.max_layers - cut_a]
        fresh = 1 + max((layer["id"] for layer in a["layers"]), default=_INPUT_ID)
        renamed = {layer["id"]: fresh + index for index, layer in enumerate(tail)}
        skips = [*a["skips"], *([renamed.get(s, -1), renamed.get(t, -1)] for s, t in b["skips"])]
        layers = [*head, *({**layer, "id": renamed[layer["id"]]} for layer in tail)]
        return self._tidy(layers, skips)

    def plan(self, genome: Genome) -> Plan:
        draft = Draft()
        values = {_INPUT_ID: INPUT}
        last = INPUT
        for layer in genome["layers"]:
            into = last
            form = draft.forms[last]
            met = [
                self._fitted(draft, values[source], form, f"skip{source}to{target}")
                for source, target in genome["skips"]
                if target == layer["id"]
            ]
            if met:
                into = draft.add([last, *met], f"add{layer['id']}")
            last = draft.step(
                "conv",
                into,
                name=f"layer{layer['id']}",
                channels=layer["channels"],
                kernel=layer["kernel"],
                stride=layer["stride"],
            )
            values[layer["id"]] = last
        return draft.plan(last)

    def _fitted(self, draft: Draft, value: int, form: Form, name: str) -> int:
        assert form.channels is not None  # a skip never ends at the first layer
        return draft.fit(value, form.channels, form.halvings, name)

    def _tidy(self, layers: list[dict[str, int]], skips: list[list[int]]) -> Layers:
        """Return a genome without broken or trivial skips and without excess strides."""
        place = {layer["id"]: index for index, layer in enumerate(layers, start=1)} | {_INPUT_ID: 0}
        whole = {(s, t) for s, t in skips if s in place and t in place and place[s] + 1 < place[t]}
        halvings, kept = 0, []
        for layer in layers:
            halvings += layer["stride"] == 2
            kept.append({**layer, "stride": 1} if halvings > self.max_halvings else layer)
        return {"layers": kept, "skips": sorted([s, t] for s, t in whole)}

    def _inserted(self, genome: Layers, rng: np.random.Generator, kernel: int) -> Layers | None:
        layers = genome["layers"]
        if len(layers) >= self.max_layers:
            return None
        index = int(rng.integers(len(layers) + 1))
        channels = layers[index - 1]["channels"] if index else self.first_channels
        new = {
            "id": 1 + max((layer["id"] for layer in layers), default=_INPUT_ID),
            "channels": channels,
            "kernel": kernel,
            "stride": 1,
        }
        return self._tidy([*layers[:index], new, *layers[index:]], genome["skips"])

    def _insert_convolution(self, genome: Layers, rng: np.random.Generator) -> Layers | None:
        return self._inserted(genome, rng, 3 if 3 in self.kernels else self.kernels[0])

    def _insert_one_to_one(self, genome: Layers, rng: np.random.Generator) -> Layers | None:
        return self._inserted(genome, rng, 1) if genome["layers"] else None

    def _remove_convolution(self, genome: Layers, rng: np.random.Generator) -> Layers | None:
        layers = genome["layers"]
        if not layers:
            return None
        index = int(rng.integers(len(layers)))
        return self._tidy([*layers[:index], *layers[index + 1 :]], genome["skips"])

    def _altered(self, genome: Layers, rng: np.random.Generator, key: str, pick: Callable[[int], int]) -> Layers | None:
        """Return the genome with one layer changed; None if it has no layer or the change has no effect."""
        layers = genome["layers"]
        if not layers:
            return None
        index = int(rng.integers(len(layers)))
        changed = {**layers[index], key: pick(layers[index][key])}
        made = self._tidy([*layers[:index], changed, *layers[index + 1 :]], genome["skips"])
        return None if made == genome else made

    def _alter_stride(self, genome: Layers, rng: np.random.Generator) -> Layers | None:
        return self._altered(genome, rng, "stride", lambda stride: 3 - stride)

    def _alter_channels(self, genome: Layers, rng: np.random.Generator) -> Layers | None:
        """Change the channels to a random number between half and twice as many, as in the paper."""

        def pick(channels: int) -> int:
            return min(int(rng.integers(max(1, channels // 2), 2 * channels + 1)), self.max_channels)

        return self._altered(genome, rng, "channels", pick)

    def _alter_kernel(self, genome: Layers, rng: np.random.Generator) -> Layers | None:
        return self._altered(genome, rng, "kernel", lambda _: self.kernels[int(rng.integers(len(self.kernels)))])

    def _add_skip(self, genome: Layers, rng: np.random.Generator) -> Layers | None:
        ids = [_INPUT_ID, *(layer["id"] for layer in genome["layers"])]
        there = {(s, t) for s, t in genome["skips"]}
        free = [
            [ids[first], ids[second]]
            for second in range(2, len(ids))
            for first in range(second - 1)
            if (ids[first], ids[second]) not in there
        ]
        if not free:
            return None
        return self._tidy(genome["layers"], [*genome["skips"], free[int(rng.integers(len(free)))]])

    def _remove_skip(self, genome: Layers, rng: np.random.Generator) -> Layers | None:
        skips = genome["skips"]
        if not skips:
            return None
        index = int(rng.integers(len(skips)))
        return {"layers": genome["layers"], "skips": [*skips[:index], *skips[index + 1 :]]}
