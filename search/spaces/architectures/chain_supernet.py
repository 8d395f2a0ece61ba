"""The supernet of the space `chain`: every layer at every position, once per possible input shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from orchestray.platform.errors import ConfigError
from orchestray.search.spaces.architectures import operations
from orchestray.search.spaces.architectures.chain import END, Chain
from orchestray.search.spaces.architectures.network import PlannedNetwork
from orchestray.search.spaces.architectures.plan import INPUT, Draft, Form, Plan, Step

if TYPE_CHECKING:
    from orchestray.search.spaces.architectures.base import Genome

_Shape = tuple[int, ...]


class ChainSuperNet(nn.Module):
    """The shared weights of all genomes of a space of chains (H. Pham et al., 2018, section 2.3: macro search).

    Two chains share a layer if it is equal, at the same position, and has the same input shape.
    """

    def __init__(self, space: Chain, input_shape: Sequence[int], num_outputs: int) -> None:
        """
        Args:
            space: space of the candidates.
            input_shape: shape of one sample.
            num_outputs: width of the final layer.

        Raises:
            ConfigError: the space has skips, with which too few chains would share the inputs of a layer.
        """
        super().__init__()
        if space.skips:
            raise ConfigError("search.architecture.skips: chains that share their weights must have none")
        self.space, self.num_outputs = space, num_outputs
        empty = PlannedNetwork(Plan((), takes_features=space.takes_features), input_shape, num_outputs)
        self.input_shape = empty.input_shape
        self.shared = nn.ModuleDict()
        """Modules by the name under which candidates share them."""
        self._make_all()

    def forward(self, inputs: Tensor, genome: Genome) -> Tensor:
        """Return the outputs [batch, num_outputs] of one candidate."""
        value = inputs.reshape(inputs.shape[0], *self.input_shape)
        for step in self.space.plan(genome).steps:
            value = self.shared[_key(step, value.shape[1:])](value)
        return value

    def child_modules(self, genome: Genome) -> dict[str, nn.Module]:
        """Return the shared modules that a candidate uses, by their names in `shared`."""
        return {key: self.shared[key] for _, key in self._keys(genome)}

    def child_state(self, genome: Genome) -> dict[str, Tensor]:
        """Return copies of a candidate's weights, to load into the network that the space builds from its genome."""
        return {
            f"steps.{step.name}.{name}": tensor.detach().clone()
            for step, key in self._keys(genome)
            for name, tensor in self.shared[key].state_dict().items()
        }

    def _keys(self, genome: Genome) -> Iterator[tuple[Step, str]]:
        """Yield the steps of a candidate with the names of their modules."""
        shape: _Shape = self.input_shape
        for step in self.space.plan(genome).steps:
            yield step, _key(step, shape)
            with torch.device("meta"):
                _, shape = operations.build(step.kind, dict(step.arguments), [shape], self.num_outputs)

    def _make_all(self) -> None:
        """Create the modules for all possible layer inputs, position by position."""
        before: dict[tuple[_Shape, Form, str | None, int], list[str]] = {
            (self.input_shape, Form(None, is_flat=self.space.takes_features), None, 0): []
        }
        for layer in range(self.space.max_depth + 1):
            after: dict[tuple[_Shape, Form, str | None, int], list[str]] = {}
            for (shape, form, _, _), kinds in before.items():
                options = self.space.kinds_after(kinds, form) if layer < self.space.max_depth else [END]
                for kind in options:
                    if kind == END:
                        self._make_last(shape, form)
                        continue
                    for step, result in self._made(kind, layer, shape, form):
                        flat = form.is_flat or kind == "dense"
                        halvings = form.halvings + (dict(step.arguments).get("stride", 1).bit_length() - 1)
                        made = [*kinds, kind]
                        after[result, Form(None, halvings, flat), kind, made.count("dense")] = made
            before = after

    def _made(self, kind: str, layer: int, shape: _Shape, form: Form) -> Iterator[tuple[Step, _Shape]]:
        """Yield every layer of a kind, with its output shape."""
        for step_kind, arguments in self.space.steps_of(kind, form):
            draft = Draft(takes_features=form.is_flat)
            draft.step(step_kind, INPUT, name=f"layer{layer}", **arguments)
            yield draft.steps[0], self._make(draft.steps[0], shape)

    def _make_last(self, shape: _Shape, form: Form) -> None:
        for pool in (False, True):
            into = shape
            for step in Draft(takes_features=form.is_flat).plan(INPUT, pool=pool).steps:
                into = self._make(step, into)

    def _make(self, step: Step, shape: _Shape) -> _Shape:
        module, result = operations.build(step.kind, dict(step.arguments), [shape], self.num_outputs)
        key = _key(step, shape)
        if key not in self.shared:
            self.shared[key] = module
        return result


def _key(step: Step, shape: Sequence[int]) -> str:
    """Return the name under which a step's module is shared."""
    return f"{step.name} {step.label} of {'x'.join(map(str, shape))}".replace(".", "_").replace(" ", "_")
