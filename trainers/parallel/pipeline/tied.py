"""Parameters that live in several stages: each worker that holds one computes a part of its gradient."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from orchestray.trainers.optim.sparse import dense

if TYPE_CHECKING:
    from orchestray.platform.comm.collective import Collective
    from orchestray.trainers.core.exchange import OptimizedTensor
    from orchestray.trainers.layout.groups import Groups
    from orchestray.trainers.parallel.pipeline.layers import Tied


@dataclass(frozen=True)
class _Shared:
    """A parameter that other workers hold too."""

    plain_name: str
    group: Collective
    """Workers that hold it, in the order of the pipeline."""


class TiedGradients:
    """The sums of the gradients of tied parameters over the workers that hold them.

    Args:
        tied: all tied parameters of the pipeline, the same list on every worker.
        workers: the worker that holds each stage.
        groups: this worker's groups; workers with tied parameters in common are connected here.
        model: the stages that this worker holds.
    """

    def __init__(self, tied: Sequence[Tied], workers: Sequence[int], groups: Groups, model: nn.Module) -> None:
        self._shared: dict[str, _Shared] = {}
        here = groups.coordinate.pipeline
        aliases = _aliases(model)
        self._plain_names = {name: names[0] for name, names in aliases.items()}
        for parameter in tied:
            holders = sorted({workers[stage] for stage, _ in parameter.uses})
            if here not in holders:
                continue
            own = next(name for stage, name in parameter.uses if workers[stage] == here)
            names = aliases.get(own, [own])
            self._plain_names.update(dict.fromkeys(names, parameter.name))
            if len(holders) > 1:
                group = groups.pipeline.subgroup(f"tied-{'-'.join(map(str, holders))}", holders)
                self._shared.update(dict.fromkeys(names, _Shared(parameter.name, group)))

    def plain_name(self, name: str) -> str:
        """Return the first name in the plain model of the parameter that has this name here."""
        return self._plain_names.get(name, name)

    def is_counted(self, name: str) -> bool:
        """Return True if this worker is the one that counts and saves the parameter."""
        return name not in self._shared or self._shared[name].group.rank == 0

    def combine(self, updates: Sequence[OptimizedTensor], gradients: MutableSequence[Tensor | None]) -> None:
        """Sum the gradients in place, with the same bits on every worker. None stays where no worker has a gradient."""
        by_group: dict[int, list[tuple[str, int]]] = {}
        collectives: dict[int, Collective] = {}
        for index, update in enumerate(updates):
            shared = self._shared.get(update.name)
            if shared is not None:
                by_group.setdefault(id(shared.group), []).append((shared.plain_name, index))
                collectives[id(shared.group)] = shared.group
        # Every worker goes through its groups, and through the parameters of each, in the same order.
        for key, members in sorted(by_group.items(), key=lambda item: min(item[1])[0]):
            indices = [index for _, index in sorted(members)]
            add_up(collectives[key], [update.tensor for update in updates], gradients, indices)


def add_up(
    collective: Collective,
    tensors: Sequence[Tensor],
    gradients: MutableSequence[Tensor | None],
    indices: Sequence[int],
) -> None:
    """Sum gradients over a group, in place, the same bits on every member. None stays where no member has a gradient.

    Args:
        collective: the group.
        tensors: the tensors that the gradients belong to.
        gradients: gradient of each tensor.
        indices: indices of the gradients to sum; the same on every member, in the same order.
    """
    for index in indices:
        gradient = gradients[index]
        gradients[index] = gradient if gradient is None else dense(gradient).resolve_conj()
    parts = [gradients[index] for index in indices]
    chosen = [tensors[index] for index in indices]
    zeros_or_parts = [
        torch.zeros_like(tensor) if part is None else part for tensor, part in zip(chosen, parts, strict=True)
    ]
    reals = [_real(each) for each in zeros_or_parts]
    used_here = reals[0].new_tensor([float(part is not None) for part in parts])
    flat = torch.cat([*(real.reshape(-1) for real in reals), used_here])
    collective.all_reduce(flat)
    is_used = (flat[-len(parts) :] > 0).tolist()
    start = 0
    for index, whole, real, used in zip(indices, zeros_or_parts, reals, is_used, strict=True):
        real.copy_(flat[start : start + real.numel()].view(real.shape))
        start += real.numel()
        if used:
            gradients[index] = whole


def _real(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor as real ones, in its own memory."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter, keyed by each of its names."""
    by_tensor: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(parameter), []).append(name)
    return {name: names for names in by_tensor.values() for name in names}
