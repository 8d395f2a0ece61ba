"""A network as steps: what every built-in space makes of a genome, before there is any torch.

A plan is what is built (`network`), compared (`canonical`) and drawn (`draw`). Its steps are those of a directed graph
without cycles: each applies one operation to values computed before. `Draft` writes a plan and leaves out at once what
changes nothing: identities, additions of one value, additions within additions, a step without weights that is there
already, and, at the end, every step that the output does not depend on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from orchestray.search.spaces.base import Graph, Node

INPUT: Final = 0
"""The value that is the network's input; the value of step i is i + 1."""

WITHOUT_WEIGHTS: Final = frozenset({"max_pool", "average_pool", "global_average", "add", "concat", "relu"})
"""Operations whose result is the same wherever they are applied to the same values."""

UNORDERED: Final = frozenset({"add", "concat"})
"""Operations whose values have no order: a sum, and channels side by side, which the weights after them may be put in
the order of."""


@dataclass(frozen=True)
class Form:
    """What is known of a value's shape before the network's inputs are."""

    channels: int | None
    """Channels of images, or features; None: as many as the network's inputs have."""
    halvings: int = 0
    """How often height and width were halved, rounding up."""
    is_flat: bool = False
    """[samples, features]; else [samples, channels, height, width]."""


@dataclass(frozen=True)
class Step:
    """One operation of a network."""

    kind: str
    """What is done; `operations.build` knows them."""
    inputs: tuple[int, ...]
    """The values it is applied to."""
    name: str
    """Of its weights in the network."""
    arguments: tuple[tuple[str, Any], ...] = ()
    """Of the operation, by name, in the order of the names."""
    shared: str | None = None
    """Name of its weights in the network of all candidates (`supernet`)."""
    slots: tuple[int, ...] = ()
    """Of a `concat`: the place of each value among all that candidates put there."""
    num_slots: int = 0
    """How many such places there are."""

    @property
    def label(self) -> str:
        """The operation with its arguments, as a person reads it."""
        known = dict(self.arguments)
        size = f" {known['kernel']}x{known['kernel']}" if "kernel" in known else ""
        wide = f" {known['channels']}" if "channels" in known else f" {known['width']}" if "width" in known else ""
        rate = f" {known['rate']}" if "rate" in known else ""
        apart = f" dilated {known['dilation']}" if known.get("dilation", 1) != 1 else ""
        stride = f" /{known['stride']}" if known.get("stride", 1) != 1 else ""
        plain = "" if known.get("norm", True) else " without norm"
        return f"{_WORDS.get(self.kind, self.kind)}{size}{wide}{rate}{apart}{stride}{plain}"


_WORDS: Mapping[str, str] = {
    "max_pool": "max",
    "average_pool": "average",
    "global_average": "global average",
    "head": "linear",
    "separable": "separable",
    "fit": "fit",
}


@dataclass(frozen=True)
class Plan:
    """A network: steps of which each uses values of those before it; the last one's value is the output."""

    steps: tuple[Step, ...]
    takes_features: bool = False
    """The input is [samples, features], not images."""

    def graph(self) -> Graph:
        """The network as it is drawn: its input, then its steps."""
        nodes = (Node("input", "input"), *(Node(step.name, step.label) for step in self.steps))
        edges = ((value, index + 1) for index, step in enumerate(self.steps) for value in step.inputs)
        return Graph(nodes, tuple(edges))

    def last_uses(self) -> list[tuple[int, ...]]:
        """Of each step the values that no later step needs."""
        last = {value: index for index, step in enumerate(self.steps) for value in step.inputs}
        return [tuple(sorted(v for v, at in last.items() if at == index)) for index in range(len(self.steps))]


@dataclass
class Draft:
    """A plan that is being written."""

    takes_features: bool = False
    """The input is [samples, features], not images."""
    steps: list[Step] = field(default_factory=list)
    forms: list[Form] = field(default_factory=list)
    """Of each value."""
    _known: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.forms.append(Form(None, is_flat=self.takes_features))

    def step(self, kind: str, *inputs: int, name: str = "", shared: str | None = None, **arguments: Any) -> int:
        """Apply an operation; returns its value.

        Args:
            kind: of the operation.
            inputs: the values it is applied to.
            name: of its weights; default: the operation's and its number. Names are made unique.
            shared: as of `Step`.
            arguments: of the operation. `stride` 1 and `dilation` 1 need not be said.
        """
        said = {key: value for key, value in arguments.items() if (key, value) not in _UNSAID}
        written = Step(kind, inputs, self._name(name or kind), tuple(sorted(said.items())), shared)
        return self._append(written, self._form_after(written))

    def add(self, values: Iterable[int], name: str = "add") -> int:
        """The sum of values of one form; sums among them are taken apart. The sum of one value is that value."""
        apart = [part for value in values for part in self._parts(value)]
        if len(apart) == 1:
            return apart[0]
        return self._append(Step("add", tuple(sorted(apart)), self._name(name)), self.forms[apart[0]])

    def concat(self, values: Sequence[int], name: str = "concat", slots: Sequence[int] = (), num_slots: int = 0) -> int:
        """Values side by side, along their channels.

        Args:
            values: of one height and width.
            name: of the step.
            slots: as of `Step`.
            num_slots: as of `Step`.
        """
        if len(values) == 1 and num_slots <= 1:
            return values[0]
        forms = [self.forms[value] for value in values]
        total = sum(form.channels or 0 for form in forms)
        written = Step("concat", tuple(values), self._name(name), (), None, tuple(slots), num_slots)
        return self._append(written, Form(total, forms[0].halvings, forms[0].is_flat))

    def fit(self, value: int, channels: int, halvings: int, name: str, *, always: bool = False) -> int:
        """A value with that many channels, halved that often in all: by a 1 x 1 convolution where it has not."""
        form = self.forms[value]
        if form == Form(channels, halvings) and not always:
            return value
        stride = 2 ** max(halvings - form.halvings, 0)
        return self.step("fit", value, name=name, shared=name, channels=channels, stride=stride)

    def plan(self, output: int, *, pool: bool = True) -> Plan:
        """The network with this value before its last, linear layer, and only the steps it needs.

        Args:
            output: the value.
            pool: average over height and width first; else every place is a feature.
        """
        if pool and not self.forms[output].is_flat:
            output = self.step("global_average", output)
        output = self.step("head", output, name="head", shared="head")
        return Plan(tuple(_needed(self.steps, output)), self.takes_features)

    def _append(self, step: Step, form: Form) -> int:
        if step.kind in WITHOUT_WEIGHTS:
            order = tuple(sorted(step.inputs)) if step.kind in UNORDERED else step.inputs
            value = self._known.setdefault((step.kind, order, step.arguments), len(self.steps) + 1)
            if value <= len(self.steps):
                return value
        self.steps.append(step)
        self.forms.append(form)
        self._taken.add(step.name)
        return len(self.steps)

    def _parts(self, value: int) -> tuple[int, ...]:
        return self.steps[value - 1].inputs if value and self.steps[value - 1].kind == "add" else (value,)

    def _name(self, name: str) -> str:
        """The name, or the first free one that begins with it."""
        number, free = 1, name
        while free in self._taken:
            number += 1
            free = f"{name}_{number}"
        return free

    def _form_after(self, step: Step) -> Form:
        before, arguments = self.forms[step.inputs[0]], dict(step.arguments)
        if step.kind in {"dense", "head"}:
            return Form(arguments.get("width"), before.halvings, is_flat=True)
        if step.kind == "global_average":
            return Form(before.channels, before.halvings, is_flat=True)
        halvings = before.halvings + (int(arguments.get("stride", 1)).bit_length() - 1)
        return Form(arguments.get("channels", before.channels), halvings, before.is_flat)


_UNSAID: Final = (("stride", 1), ("dilation", 1), ("norm", True))


def _needed(steps: Sequence[Step], output: int) -> list[Step]:
    """The steps that the output depends on, in their order, renumbered."""
    needed = {output}
    for value in range(output, 0, -1):
        if value in needed:
            needed.update(steps[value - 1].inputs)
    number = {INPUT: INPUT}
    kept: list[Step] = []
    for value in sorted(needed - {INPUT}):
        step = steps[value - 1]
        number[value] = len(kept) + 1
        inputs = tuple(number[used] for used in step.inputs)
        kept.append(Step(step.kind, inputs, step.name, step.arguments, step.shared, step.slots, step.num_slots))
    return kept
