"""Chains of layers; the options for a layer depend on the layers before it and on the size reached.

Follows MetaQNN (B. Baker et al., "Designing Neural Network Architectures using Reinforcement Learning", 2017, section
4) and, with `skips`, the networks of E. Real et al., "Large-Scale Evolution of Image Classifiers", 2017.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, Final

from orchestray.platform.errors import ConfigError
from orchestray.search.spaces.architectures.base import Genome
from orchestray.search.spaces.architectures.choices import Choose, ComposedSpace
from orchestray.search.spaces.architectures.plan import INPUT, Draft, Form, Plan

if TYPE_CHECKING:
    from orchestray.search.spaces.architectures.chain_supernet import ChainSuperNet

KINDS: Final = ("conv", "separable", "pool", "dropout", "dense")
END: Final = "end"


class Chain(ComposedSpace):
    """A space of chains of layers.

    The choices are `layer<i>.kind` ("end": the chain ends), `layer<i>.<argument>`, and `last`. The latter says how
    images become features before the final linear layer ("average" over height and width, or "flatten").
    """

    def __init__(
        self,
        *,
        min_depth: int = 1,
        max_depth: int = 6,
        layers: Sequence[str] = KINDS,
        channels: Sequence[int] = (8, 16, 32),
        kernels: Sequence[int] = (1, 3, 5),
        strides: Sequence[int] = (1,),
        widths: Sequence[int] = (32, 64, 128),
        rates: Sequence[float] = (0.2, 0.5),
        pools: Sequence[str] = ("max", "average"),
        max_halvings: int = 2,
        max_dense: int = 2,
        skips: bool = False,
    ) -> None:
        """
        Args:
            min_depth: minimum number of layers, without the final linear one.
            max_depth: maximum number of layers.
            layers: kinds of layers: any of "conv", "separable", "pool", "dropout" and "dense". Without the first three,
                the network takes flat features, whatever the shape of its inputs.
            channels: options for the channels of a convolution.
            kernels: options for the kernel size of a convolution, odd.
            strides: options for the stride of a convolution: 1, 2.
            widths: options for the width of a dense layer.
            rates: options for the dropout probability.
            pools: options for the kind of pooling, with stride 2.
            max_halvings: maximum number of times that height and width are halved; 2 reduces images of 8 x 8 to 2 x 2.
            max_dense: maximum number of dense layers.
            skips: True to let a convolution add the output of an earlier layer to its own.
        """
        self.min_depth, self.max_depth = min_depth, max_depth
        self.layers = tuple(layers)
        self.options: Mapping[str, Sequence[Any]] = {
            "channels": tuple(channels),
            "kernel": tuple(kernels),
            "width": tuple(widths),
            "rate": tuple(rates),
            "pool": tuple(pools),
        }
        self.strides = tuple(strides)
        self.max_halvings, self.max_dense, self.skips = max_halvings, max_dense, skips
        self._check()

    @property
    def takes_features(self) -> bool:
        """True if the networks take flat features instead of images."""
        return not {"conv", "separable", "pool"} & set(self.layers)

    def compose(self, choose: Choose) -> Plan:
        draft = Draft(takes_features=self.takes_features)
        values: list[int] = []
        kinds: list[str] = []
        for layer in range(self.max_depth):
            value = values[-1] if values else INPUT
            options = self.kinds_after(kinds, draft.forms[value])
            kind = choose(f"layer{layer}.kind", options) if options != [END] else END
            if kind == END:
                break
            values.append(self._layer(draft, values, kind, layer, choose))
            kinds.append(kind)
        output = values[-1] if values else INPUT
        if draft.forms[output].is_flat:
            return draft.plan(output)
        return draft.plan(output, pool=choose("last", ["average", "flatten"]) == "average")

    def layers_of(self, genome: Genome) -> list[dict[str, Any]]:
        """Return the layers as an editable list of their choices: {"kind": "conv", "channels": 8, ...}."""
        layers: dict[int, dict[str, Any]] = {}
        for name, value in self.chosen_in(genome).items():
            layer, dot, argument = name.partition(".")
            if dot and (argument, value) != ("kind", END):
                layers.setdefault(int(layer.removeprefix("layer")), {})[argument] = value
        return [layers[index] for index in sorted(layers)]

    def genome_from(self, layers: Sequence[Mapping[str, Any]], last: str = "average") -> dict[str, Any]:
        """Return the genome of a list of layers.

        Args:
            layers: layers in the format of `layers_of`.
            last: how images become features, where this choice is made.

        Raises:
            ConfigError: the layers are not a chain of this space.
        """
        wanted = {f"layer{index}.{name}": value for index, layer in enumerate(layers) for name, value in layer.items()}
        wanted |= {f"layer{len(layers)}.kind": END, "last": last}
        pick = self._answers(wanted)
        genome: dict[str, Any] = self.genome_of(self.decide(pick))
        if surplus := sorted(wanted.keys() - genome.keys() - {f"layer{len(layers)}.kind", "last"}):
            raise ConfigError(f"choices that do not come up in this chain: {', '.join(surplus)}")
        return genome

    def kinds_after(self, before: Sequence[str], form: Form) -> list[str]:
        """Return the kinds that may follow these layers, `END` among them; `form` is the form of their output."""
        last = before[-1] if before else None
        allowed = {
            "conv": not form.is_flat,
            "separable": not form.is_flat,
            "pool": not form.is_flat and last != "pool" and form.halvings < self.max_halvings,
            "dropout": bool(before) and last != "dropout",
            "dense": before.count("dense") < self.max_dense,
        }
        kinds = [kind for kind in self.layers if allowed[kind]]
        return [*kinds, END] if len(before) >= self.min_depth or not kinds else kinds

    def steps_of(self, kind: str, form: Form) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield every step that a layer of a kind can be, with its arguments; `form` is the form of its input."""
        options = self.options
        if kind == "dense":
            yield from (("dense", {"width": width}) for width in options["width"])
        elif kind == "dropout":
            yield from (("dropout", {"rate": rate}) for rate in options["rate"])
        elif kind == "pool":
            yield from ((f"{pool}_pool", {"kernel": 3, "stride": 2}) for pool in options["pool"])
        else:
            for channels, kernel, stride in product(options["channels"], options["kernel"], self._strides(form)):
                yield kind, {"channels": channels, "kernel": kernel, "stride": stride}

    def supernet(self, input_shape: Sequence[int], num_outputs: int) -> ChainSuperNet:
        """Return the supernet of this space, whose candidates share their weights."""
        from orchestray.search.spaces.architectures.chain_supernet import ChainSuperNet

        return ChainSuperNet(self, input_shape, num_outputs)

    def _strides(self, form: Form) -> list[int]:
        return [stride for stride in self.strides if stride == 1 or form.halvings < self.max_halvings]

    def _layer(self, draft: Draft, values: Sequence[int], kind: str, layer: int, choose: Choose) -> int:
        value = values[-1] if values else INPUT
        name = f"layer{layer}"

        def chosen(argument: str) -> Any:
            return choose(f"{name}.{argument}", self.options[argument])

        if kind == "dense":
            return draft.step("dense", value, name=name, width=chosen("width"))
        if kind == "dropout":
            return draft.step("dropout", value, name=name, rate=chosen("rate"))
        if kind == "pool":
            return draft.step(f"{chosen('pool')}_pool", value, name=name, kernel=3, stride=2)
        strides = self._strides(draft.forms[value])
        stride = choose(f"{name}.stride", strides) if len(self.strides) > 1 and len(strides) > 1 else strides[0]
        made = draft.step(kind, value, name=name, channels=chosen("channels"), kernel=chosen("kernel"), stride=stride)
        skip = choose(f"{name}.skip", [None, *range(layer - 1)]) if self.skips and layer > 1 else None
        if skip is None:
            return made
        form = draft.forms[made]
        assert form.channels is not None
        return draft.add([made, draft.fit(values[skip], form.channels, form.halvings, f"{name}_skip")], f"{name}_add")

    def _check(self) -> None:
        problems = []
        if unknown := sorted(set(self.layers) - set(KINDS)):
            problems.append(f"layers: there are {', '.join(KINDS)}, got {', '.join(unknown)}")
        if not set(self.layers) - {"dropout"}:
            problems.append("layers: must name a kind of layer other than dropout")
        if not 0 <= self.min_depth <= self.max_depth:
            problems.append(f"min_depth: must be from 0 to max_depth, which is {self.max_depth}, got {self.min_depth}")
        problems += [f"{name}: must have an option" for name, options in self.options.items() if not options]
        problems += [f"kernels: must be odd, got {kernel}" for kernel in self.options["kernel"] if kernel % 2 == 0]
        if 1 not in self.strides or set(self.strides) - {1, 2, 4}:
            problems.append(f"strides: must be 1, and may be 2 and 4, got {list(self.strides)}")
        if set(self.options["pool"]) - {"max", "average"}:
            problems.append(f'pools: there are "max" and "average", got {list(self.options["pool"])}')
        if problems:
            raise ConfigError([f"search.architecture.{problem}" for problem in problems])
