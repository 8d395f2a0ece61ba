"""A test that shows, before the first step, which whole parameters have partial gradients: one backward pass.

A whole parameter may take part in what is split, for example as a learnt scale of a split layer's outputs. Each
worker's gradient is then a part, and the parts must be summed. Correct outputs do not prove correct gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orchestray.platform.comm.flat_tensors import flatten, unflatten
from orchestray.platform.errors import ConfigError
from orchestray.trainers.core.every_tensor import every_tensor_in
from orchestray.trainers.core.inputs import call
from orchestray.trainers.optim.sparse import dense
from orchestray.trainers.parallel.tensor.base import STYLES
from orchestray.trainers.parallel.tensor.verify import evaluating, in_reals

if TYPE_CHECKING:
    from orchestray.trainers.parallel.tensor.base import Split

_SEED = 21
_TOLERANCES = {torch.float64: (1e-6, 1e-11, 1e-3), torch.float32: (1e-2, 1e-5, 1e-2)}
"""Tolerances by type. Two limit the error of a gradient, relative to its own norm and to that of all. The third limits
the error of the workers' sum, relative to each worker's error, for their gradients to count as parts.
"""
_TOLERANCES_SHORT = (float("inf"), float("inf"), 0.3)
_LEAVES = frozenset(STYLES) - {"heads", "sequence", "branches", "batch", "height", "width", "dropout"}
"""Styles after which every parameter of a module is split or accounted for."""


class GradientShares:
    """The gradients of what may stay whole, taken from the plain model before it is split.

    Args:
        model: the plain model.
        example: inputs of a micro-batch.
        styles: styles of the modules to be split.
    """

    def __init__(self, model: nn.Module, example: Any, styles: Mapping[str, Collection[str]]) -> None:
        self._model = model
        self._example = example
        split = {name for name, of_module in styles.items() if not _LEAVES.isdisjoint(of_module)}
        self._plain: dict[str, Tensor] = {}
        self._dtype = torch.float32
        # Some models have no backward pass in evaluation (recurrent ones on a GPU): these are not tested.
        with contextlib.suppress(Exception):
            self._plain, self._dtype = _gradients(model, example, lambda name: name.rpartition(".")[0] not in split)

    def find(self, split: Split) -> None:
        """Add to `split.partial` the whole parameters of which each worker computes a part of the gradient.

        All workers of the group call this, with the model split, and get the same result.

        Raises:
            ConfigError: a worker's gradient is neither the whole one nor a part of it.
        """
        known = split.pieces.keys() | split.partial
        names = [name for name in self._plain if name not in known]
        self._plain = {name: self._plain[name] for name in names}
        if not names:
            return
        found, _ = _gradients(self._model, self._example, self._plain.__contains__)
        plain = list(self._plain.values())
        mine = [found[name] if name in found else torch.zeros_like(self._plain[name]) for name in names]
        total = flatten(mine)
        split.group().all_reduce(total)
        sums = unflatten(total, mine)
        # The maximum over the workers, so that they agree.
        apart = _norms([a - b for a, b in zip(mine, plain, strict=True)])
        split.group().all_reduce(apart, "max")
        apart_added_up = _norms([a - b for a, b in zip(sums, plain, strict=True)])
        split.group().all_reduce(apart_added_up, "max")
        size = _norms(plain)
        of_own, of_all, nearer = _TOLERANCES.get(self._dtype, _TOLERANCES_SHORT)
        are_parts = apart_added_up < nearer * apart
        is_off = ~are_parts & (apart > of_own * size + of_all * size.norm())
        if is_off.any():
            raise ConfigError(_torn(names[int(is_off.nonzero()[0])]))
        chosen = {id(self._parameter(name)) for name, part in zip(names, are_parts.tolist(), strict=True) if part}
        # A tied parameter has several names, and a stage of a pipeline may know it by any of them.
        split.partial |= {
            name for name, parameter in self._model.named_parameters(remove_duplicate=False) if id(parameter) in chosen
        }

    def _parameter(self, name: str) -> nn.Parameter:
        owner, _, tensor = name.rpartition(".")
        return self._model.get_submodule(owner).get_parameter(tensor)


def _gradients(
    model: nn.Module, example: Any, is_wanted: Callable[[str], bool]
) -> tuple[dict[str, Tensor], torch.dtype]:
    """Return the gradients of a weighted sum of the outputs, by name, zero where
    there is none; and the outputs' type.
    """
    wanted = {name: value for name, value in model.named_parameters() if value.requires_grad and is_wanted(name)}
    if not wanted:
        return {}, torch.float32
    generator = torch.Generator().manual_seed(_SEED)
    with evaluating(model), torch.enable_grad():
        outputs = [output for output in every_tensor_in(call(model, example)) if output.requires_grad]
        if not outputs:
            return {}, torch.float32
        weights = [torch.randn(output.shape, generator=generator).to(output) for output in outputs]
        found: Sequence[Tensor | None] = torch.autograd.grad(outputs, list(wanted.values()), weights, allow_unused=True)
    gradients = {
        name: torch.zeros_like(parameter) if gradient is None else dense(gradient)
        for (name, parameter), gradient in zip(wanted.items(), found, strict=True)
    }
    return gradients, outputs[0].dtype


def _norms(tensors: list[Tensor]) -> Tensor:
    return torch.stack([in_reals(tensor).double().norm() for tensor in tensors])


def _torn(name: str) -> str:
    return (
        f"The parameter {name!r} takes part in what this plan splits over the workers and in what it leaves whole, "
        "so that no worker knows its gradient. Leave the layers around it out of the plan (or give them the style "
        "'output_gathered'), or use a parameter for each place."
    )
