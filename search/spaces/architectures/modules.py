"""Blueprints of modules: the space of CoDeepNEAT.

R. Miikkulainen et al., "Evolving Deep Neural Networks", 2017, section 3.2. A blueprint is a graph in which each node
names a module; a module is a small graph of layers. The network is the blueprint with each node replaced by a copy of
its module, with its own weights. Blueprints and modules are spaces themselves, which can be evolved side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from orchestray.platform.errors import ConfigError
from orchestray.search.spaces.architectures.base import Genome
from orchestray.search.spaces.architectures.choices import ChoiceSpace, Choose, ComposedSpace, Decision
from orchestray.search.spaces.architectures.genetic import pairs
from orchestray.search.spaces.architectures.plan import INPUT, Draft, Plan

KINDS: Final = ("conv", "separable")


class _Part(ChoiceSpace):
    """A space of blueprints or of modules, which are not networks by themselves."""

    def build(self, genome: Genome, input_shape: Sequence[int], num_outputs: int) -> Any:
        raise ConfigError("a blueprint or a module is only a part of a network: put them together by `assemble`")


class Blueprints(_Part):
    """Graphs of modules. The choices are `nodes`, `<node>.module`, `<node>.pool` and `<a>-<b>` (b uses a), from 1."""

    def __init__(self, num_modules: int, max_nodes: int, max_halvings: int) -> None:
        """
        Args:
            num_modules: number of modules to choose from.
            max_nodes: maximum number of nodes of a blueprint.
            max_halvings: maximum number of nodes followed by pooling.
        """
        self.num_modules, self.max_nodes, self.max_halvings = num_modules, max_nodes, max_halvings

    def compose(self, choose: Choose) -> tuple[list[int], list[bool], list[tuple[int, int]]]:
        """Return the module of each node, whether pooling follows it, and the edges."""
        count = choose("nodes", range(1, self.max_nodes + 1))
        modules: list[int] = []
        pools: list[bool] = []
        for node in range(count):
            modules.append(choose(f"{node + 1}.module", range(self.num_modules)))
            pools.append(sum(pools) < self.max_halvings and choose(f"{node + 1}.pool", (False, True)))
        return modules, pools, [(a, b) for a, b in pairs(count) if choose(f"{a + 1}-{b + 1}", (0, 1))]


class ModuleLayers(_Part):
    """Graphs of layers. The choices are `layers`, `<layer>.kind`, `.channels`, `.kernel`, `.rate`, and `<a>-<b>`."""

    def __init__(
        self, max_layers: int, channels: Sequence[int], kernels: Sequence[int], rates: Sequence[float]
    ) -> None:
        """
        Args:
            max_layers: maximum number of layers of a module.
            channels: options for the channels of a layer.
            kernels: options for the kernel size of a layer, odd.
            rates: options for the dropout probability after a layer; 0: none.
        """
        self.max_layers = max_layers
        self.channels, self.kernels, self.rates = tuple(channels), tuple(kernels), tuple(rates)

    def compose(self, choose: Choose) -> tuple[list[dict[str, Any]], list[tuple[int, int]]]:
        """Return the layers and the edges between them."""
        count = choose("layers", range(1, self.max_layers + 1))
        layers = [
            {
                "kind": choose(f"{layer}.kind", KINDS),
                "channels": choose(f"{layer}.channels", self.channels),
                "kernel": choose(f"{layer}.kernel", self.kernels),
                "rate": choose(f"{layer}.rate", self.rates),
            }
            for layer in range(1, count + 1)
        ]
        return layers, [(a, b) for a, b in pairs(count) if choose(f"{a + 1}-{b + 1}", (0, 1))]


class Modules(ComposedSpace):
    """A space of networks assembled from a blueprint and modules.

    A genome is {"blueprint": {...}, "modules": [{...}, ...]}, each with its choices by name; modules that the blueprint
    does not use are null. In both graphs, a node without an edge to it takes the graph's input. The outputs of the
    nodes that no other node uses are the graph's output. Values that meet are added, converted to the largest number of
    channels and the smallest size among them.
    """

    def __init__(
        self,
        *,
        num_modules: int = 3,
        max_nodes: int = 4,
        max_layers: int = 3,
        channels: Sequence[int] = (8, 16, 32),
        kernels: Sequence[int] = (1, 3, 5),
        rates: Sequence[float] = (0.0, 0.2),
        max_halvings: int = 2,
        stem: int = 8,
    ) -> None:
        """
        Args:
            num_modules: number of modules of a network.
            max_nodes: maximum number of nodes of a blueprint.
            max_layers: maximum number of layers of a module.
            channels: options for the channels of a layer.
            kernels: options for the kernel size of a layer, odd.
            rates: options for the dropout probability after a layer; 0: none.
            max_halvings: maximum number of blueprint nodes followed by pooling.
            stem: channels of the first convolution.
        """
        least = min(num_modules, max_nodes, max_layers, stem, *channels)
        if least < 1 or max_halvings < 0 or not channels or not kernels or not rates:
            raise ConfigError("search.architecture: numbers of modules, nodes, layers and channels must be >= 1")
        if even := [kernel for kernel in kernels if kernel % 2 == 0]:
            raise ConfigError(f"search.architecture.kernels: must be odd, got {', '.join(map(str, even))}")
        self.num_modules, self.stem = num_modules, stem
        self.blueprints = Blueprints(num_modules, max_nodes, max_halvings)
        self.layers = ModuleLayers(max_layers, channels, kernels, rates)

    def answer(self, choose: Choose) -> tuple[Any, dict[int, Any]]:
        """Return the result of `Blueprints.compose`, and that of `ModuleLayers.compose` for each used module."""
        blueprint = self.blueprints.compose(_within("blueprint", choose))
        used = sorted(set(blueprint[0]))
        return blueprint, {index: self.layers.compose(_within(f"module{index}", choose)) for index in used}

    def compose(self, choose: Choose) -> Plan:
        (modules, pools, edges), built = self.answer(choose)
        draft = Draft()
        stem = draft.step("conv", INPUT, name="stem", channels=self.stem, kernel=3)

        def node(index: int, value: int) -> int:
            layers, edges_within = built[modules[index]]
            made = self._module(draft, layers, edges_within, value, f"node{index + 1}")
            if not pools[index]:
                return made
            return draft.step("max_pool", made, name=f"node{index + 1}_pool", kernel=3, stride=2)

        return draft.plan(_graph(draft, len(modules), edges, stem, node, "blueprint"))

    def assemble(self, blueprint: Mapping[str, Any], modules: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the genome of a blueprint and the modules it chooses from by index."""
        used = set(self.blueprints.compose(lambda name, _options: blueprint[name])[0])
        return {
            "blueprint": dict(blueprint),
            "modules": [dict(module) if index in used else None for index, module in enumerate(modules)],
        }

    def genome_of(self, decisions: Sequence[Decision]) -> dict[str, Any]:
        chosen = {decision.name: decision.value for decision in decisions}
        parts = [_part(f"module{index}", chosen) or None for index in range(self.num_modules)]
        return {"blueprint": _part("blueprint", chosen), "modules": parts}

    def chosen_in(self, genome: Genome) -> Mapping[str, Any]:
        try:
            parts = {f"module{index}": module or {} for index, module in enumerate(genome["modules"])}
            parts["blueprint"] = genome["blueprint"]
            return {f"{part}.{name}": value for part, chosen in parts.items() for name, value in chosen.items()}
        except (KeyError, TypeError, AttributeError):
            raise ConfigError(
                f"a genome of this space has a blueprint and modules, each a mapping of choices, got {genome!r}"
            ) from None

    def _module(
        self, draft: Draft, layers: Sequence[Mapping[str, Any]], edges: Sequence[tuple[int, int]], value: int, name: str
    ) -> int:
        def layer(index: int, inputs: int) -> int:
            wanted, place = layers[index], f"{name}_layer{index + 1}"
            made = draft.step(wanted["kind"], inputs, name=place, channels=wanted["channels"], kernel=wanted["kernel"])
            return draft.step("dropout", made, name=f"{place}_dropout", rate=wanted["rate"]) if wanted["rate"] else made

        return _graph(draft, len(layers), edges, value, layer, name)


def _graph(draft: Draft, count: int, edges: Sequence[tuple[int, int]], value: int, make: Any, name: str) -> int:
    """Build a graph whose nodes are made by `make(node, value)`; return its output."""
    values: list[int] = []
    for node in range(count):
        used = [values[a] for a, b in edges if b == node]
        values.append(make(node, _met(draft, used, f"{name}_in{node + 1}") if used else value))
    loose = [made for node, made in enumerate(values) if all(a != node for a, _ in edges)]
    return _met(draft, loose, f"{name}_out")


def _met(draft: Draft, values: Sequence[int], name: str) -> int:
    """Return the sum of values that may differ in channels and size."""
    channels = max(draft.forms[value].channels or 0 for value in values)
    halvings = max(draft.forms[value].halvings for value in values)
    return draft.add([draft.fit(value, channels, halvings, f"{name}_fit{i}") for i, value in enumerate(values)], name)


def _within(part: str, choose: Choose) -> Choose:
    return lambda name, options: choose(f"{part}.{name}", options)


def _part(part: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(f"{part}."): value for name, value in chosen.items() if name.startswith(f"{part}.")}
