"""The small all-reduce of a sharded exchange: a few numbers, which parameters were used, and scalars."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.pending import Pending
from orchestray.trainers.core.exchange import MAX_EXTRAS
from orchestray.trainers.sync.common.exact_sum import ExactSums


class Replicated:
    """One small all-reduce a step, in double precision."""

    def __init__(self, parameters: Sequence[Tensor], scalars: Sequence[Tensor], collective: Collective) -> None:
        """
        Args:
            parameters: all trained parameters; each has a flag.
            scalars: the parameters that are not sharded: scalars, and tensors without elements.
            collective: the replicas.
        """
        self._collective = collective
        self._sums = ExactSums(len(parameters), MAX_EXTRAS, collective.rank, collective.size)
        num_slots = self._sums.num_slots(torch.float64)
        num_scalars = sum(_num_floats(scalar) for scalar in scalars)
        device = parameters[0].device if parameters else torch.device("cpu")
        self._flat = torch.zeros(num_slots + num_scalars, dtype=torch.float64, device=device)
        self._sums.use(self._flat[:num_slots])
        order = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._scalars: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        """Maps an index to the parameter, its place in the flat tensor, and its gradient."""
        for scalar in scalars:
            place = self._flat[num_slots : num_slots + _num_floats(scalar)]
            if scalar.is_complex():
                place = torch.view_as_complex(place.view(-1, 2))
            place = place.view(scalar.shape)
            self._scalars[order[id(scalar)]] = scalar, place, torch.zeros_like(scalar, requires_grad=False)
            num_slots += _num_floats(scalar)
        self._pending: Pending | None = None

    def start(self, used: list[bool], extras: Sequence[float | Tensor]) -> None:
        """Send this replica's values.

        Args:
            used: for each parameter, True if it has a gradient here; this method sets those of the scalars.
            extras: up to `MAX_EXTRAS` numbers.
        """
        for index, (scalar, place, _) in self._scalars.items():
            used[index] = scalar.grad is not None
            place.zero_() if scalar.grad is None else place.copy_(scalar.grad)
        self._sums.write(used, extras)
        self._pending = self._collective.start_all_reduce(self._flat)

    def wait(self) -> tuple[list[bool], list[float]]:
        """Return, for each parameter, True if any replica used it, and the sum of each extra over the replicas."""
        assert self._pending is not None
        self._pending.wait()
        self._pending = None
        for _, place, gradient in self._scalars.values():
            gradient.copy_(place)
        return self._sums.read()

    def gradient(self, index: int) -> Tensor:
        """Return, after `wait`, the gradient of the scalar parameter of that index; its memory stays the same."""
        return self._scalars[index][2]


def _num_floats(scalar: Tensor) -> int:
    return scalar.numel() * (2 if scalar.is_complex() else 1)
