"""Networks as plans: the form to which every built-in space converts a genome, without torch.

A plan can be built (`network`), compared (`canonical`) and drawn (`draw`). Its steps form a directed acyclic graph:
each applies one operation to values computed before. `Draft` writes a plan and omits what has no effect: identities,
additions of one value, nested additions, and repeated steps without weights. At the end it also omits every step that
the output does not depend on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from orchestray.search.spaces.architectures.base import Graph, Node

INPUT: Final = 0
"""Index of the value that is the network's input; the value of step i is i + 1."""

WITHOUT_WEIGHTS: Final = frozenset({"max_pool", "average_pool", "global_average", "add", "concat", "relu"})
"""Operations without weights: equal inputs always give equal results."""

UNORDERED: Final = frozenset({"add", "concat"})
"""Operations whose inputs have no order: a sum, and a concatenation, since the weights after it can be permuted to
match.
"""


@dataclass(frozen=True)
class Form:
    """The known part of a value's shape before the shape of the network's input is known."""

    channels: int | None
    """Number of channels of images, or of features; None: the same as in the network's input."""
    halvings: int = 0
    """Number of times that height and width have been halved, rounding up."""
    is_flat: bool = False
    """True for [samples, features]; False for [samples, channels, height, width]."""


@dataclass(frozen=True)
class Step:
    """One operation of a network."""

    kind: str
    """Kind of the operation, as `operations.build` takes it."""
    inputs: tuple[int, ...]
    """Values it is applied to."""
    name: str
    """Name of its module in the network."""
    arguments: tuple[tuple[str, Any], ...] = ()
    """Arguments of the operation, sorted by name."""
    shared: str | None = None
    """Name of its module in the supernet (`supernet`)."""
    slots: tuple[int, ...] = ()
    """Positions of the inputs of a `concat` among all that candidates may put there."""
    num_slots: int = 0
    """Number of such positions."""

    @property
    def label(self) -> str:
        """Readable name of the operation with its arguments."""
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
    """A network: steps that each use earlier values; the value of the last step is the output."""

    steps: tuple[Step, ...]
    takes_features: bool = False
    """True if the input is [samples, features] instead of images."""

    def graph(self) -> Graph:
        """Return the network as a graph to draw: its input, then its steps."""
        nodes = (Node("input", "input"), *(Node(step.name, step.label) for step in self.steps))
        edges = ((value, index + 1) for index, step in enumerate(self.steps) for value in step.inputs)
        return Graph(nodes, tuple(edges))

    def last_uses(self) -> list[tuple[int, ...]]:
        """Return for each step the values that no later step needs."""
        last = {value: index for index, step in enumerate(self.steps) for value in step.inputs}
        return [tuple(sorted(v for v, at in last.items() if at == index)) for index in range(len(self.steps))]


@dataclass
class Draft:
    """A plan that is being written."""

    takes_features: bool = False
    """True if the input is [samples, features] instead of images."""
    steps: list[Step] = field(default_factory=list)
    forms: list[Form] = field(default_factory=list)
    """Form of each value."""
    _known: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.forms.append(Form(None, is_flat=self.takes_features))

    def step(self, kind: str, *inputs: int, name: str = "", shared: str | None = None, **arguments: Any) -> int:
        """Apply an operation; return its value.

        Args:
            kind: kind of the operation.
            inputs: values it is applied to.
            name: name of its module; default: its kind. Names are made unique.
            shared: name of its module in the supernet.
            arguments: arguments of the operation. `stride` 1 and `dilation` 1 may be omitted.
        """
        said = {key: value for key, value in arguments.items() if (key, value) not in _UNSAID}
        written = Step(kind, inputs, self._name(name or kind), tuple(sorted(said.items())), shared)
        return self._append(written, self._form_after(written))

    def add(self, values: Iterable[int], name: str = "add") -> int:
        """Add values of one form, flattening sums among them. The sum of one value is that value."""
        apart = [part for value in values for part in self._parts(value)]
        if len(apart) == 1:
            return apart[0]
        return self._append(Step("add", tuple(sorted(apart)), self._name(name)), self.forms[apart[0]])

    def concat(self, values: Sequence[int], name: str = "concat", slots: Sequence[int] = (), num_slots: int = 0) -> int:
        """Concatenate values along their channels.

        Args:
            values: values of the same height and width.
            name: name of the step.
            slots: position of each value among all that candidates may put there.
            num_slots: number of such positions.
        """
        if len(values) == 1 and num_slots <= 1:
            return values[0]
        forms = [self.forms[value] for value in values]
        total = sum(form.channels or 0 for form in forms)
        written = Step("concat", tuple(values), self._name(name), (), None, tuple(slots), num_slots)
        return self._append(written, Form(total, forms[0].halvings, forms[0].is_flat))

    def fit(self, value: int, channels: int, halvings: int, name: str, *, always: bool = False) -> int:
        """Return the value with the given channels and halvings, converted by a 1 x 1 convolution if needed."""
        form = self.forms[value]
        if form == Form(channels, halvings) and not always:
            return value
        stride = 2 ** max(halvings - form.halvings, 0)
        return self.step("fit", value, name=name, shared=name, channels=channels, stride=stride)

    def plan(self, output: int, *, pool: bool = True) -> Plan:
        """Return the network that ends with this value and a linear layer, with only the steps it needs.

        Args:
            output: the value.
            pool: True to average over height and width first, False to flatten.
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
        """Return the name, or the first unused one that begins with it."""
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
    """Return the steps that the output depends on, in order, renumbered."""
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
