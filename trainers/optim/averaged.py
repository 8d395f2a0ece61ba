"""An average of the weights that an optimizer keeps beside them: exponential (EMA), or of equal weights (SWA).

EMA: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging" (1992), with weights that decay. SWA:
Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization" (2018), algorithm 1. The arithmetic
is that of `torch.optim.swa_utils`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from orchestray.platform.comm.collective import Collective
from orchestray.platform.errors import CheckpointError
from orchestray.trainers.optim.optimizers import Optimizer

if TYPE_CHECKING:
    from orchestray.trainers.layout.tensor_slice import TensorSlice

AVERAGE = "average"
"""Name of the slot that holds a parameter's average."""


class Averaged(Optimizer):
    """An optimizer that averages what it updates; the average is a slot like its others, and is saved with them.

    The first weights that are averaged are copied, as by `torch.optim.swa_utils.AveragedModel`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        type: str,  # noqa: A002 - the config's key
        *,
        decay: float = 0.0,
        every_steps: int | None = 1,
        from_step: int | None = None,
        from_epoch: int | None = None,
    ) -> None:
        """
        Args:
            optimizer: optimizer that moves the weights.
            type: `ema` or `swa`.
            decay: part of the average that stays when weights are added (`ema`).
            every_steps: number of steps between two additions; None: an epoch.
            from_step: number of steps before the first that counts; None: it is given by `from_epoch`.
            from_epoch: the same in epochs; None: 0.
        """
        super().__init__()
        self.slots = (*optimizer.slots, AVERAGE)
        self.whole_slots = optimizer.whole_slots
        self.uses_norms, self.takes_parts = optimizer.uses_norms, optimizer.takes_parts
        self.mixes_parameters, self.first_names = optimizer.mixes_parameters, optimizer.first_names
        self.measures_statistics = type == "swa"
        """True if running statistics of batch normalisation have to be measured for the average."""
        self._optimizer = optimizer
        add = get_ema_multi_avg_fn(decay) if type == "ema" else get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]
        self._add: Callable[..., None] = add
        self._every_steps, self._from_step, self._from_epoch = every_steps, from_step, from_epoch
        self._every = self._from = 1
        self._averages: list[Tensor] | None = None

    def begin(self, steps_per_epoch: int) -> None:
        """Fix the steps whose weights are averaged, before the first call of `add` or `has_begun`."""
        self._every = self._every_steps or steps_per_epoch
        self._from = (self._from_epoch or 0) * steps_per_epoch if self._from_step is None else self._from_step

    def has_begun(self, step: int) -> bool:
        """Return True if there is an average after a step; the answer is the same on every worker."""
        return step - self._from >= self._every

    def add(self, step: int) -> None:
        """Add the weights after a step to the average, if it is one of those that count.

        Args:
            step: number of the step, from 1.

        Raises:
            CheckpointError: the run has resumed from a checkpoint without an average.
        """
        before, rest = divmod(step - self._from, self._every)
        if step <= self._from or rest:
            return
        current = [parameter.detach() for parameter in self._templates]
        if before == 1:
            self._averages = [tensor.clone() for tensor in current]
        elif current:
            self._add(self._there(), current, torch.tensor(before - 1))

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights with their average, in place; a second call restores the bits of both."""
        if not self._templates:
            return
        for parameter, average in zip(self._templates, self._there(), strict=True):
            own = parameter.detach().clone()
            parameter.detach().copy_(average)
            average.copy_(own)

    def _there(self) -> list[Tensor]:
        if self._averages is None:
            raise CheckpointError("The checkpoint has no average of the weights; go on with the config that saved it.")
        return self._averages

    # -- as an optimizer -----------------------------------------------------------------------------------------------

    def init(self, named_params: Iterable[tuple[str, Tensor]]) -> None:
        named = list(named_params)
        self._names, self._templates = [name for name, _ in named], [parameter for _, parameter in named]
        self._averages = None
        self._optimizer.init(named)

    def replaced(self, change: Callable[[Optimizer], Optimizer]) -> Optimizer:
        self._optimizer = self._optimizer.replaced(change)
        return self

    def observe(self, *given: Any, **named: Any) -> None:
        self._optimizer.observe(*given, **named)

    def join(self, replicas: Collective, *, is_alike: bool = True) -> None:
        self._optimizer.join(replicas, is_alike=is_alike)

    def slot_piece(self, name: str, slot: str, piece: TensorSlice) -> TensorSlice:
        if slot == AVERAGE:
            return super().slot_piece(name, slot, piece)
        return self._optimizer.slot_piece(name, slot, piece)

    def slots_of(self, name: str) -> tuple[str, ...]:
        return (*self._optimizer.slots_of(name), AVERAGE)

    def begin_step(self, step: int, num_samples: int, batch_samples: int) -> None:
        self._optimizer.begin_step(step, num_samples, batch_samples)

    def step(self, params: Sequence[Tensor], grads: Sequence[Tensor | None], lr: float) -> None:
        optimizer = self._optimizer
        optimizer.norm_reducer, optimizer.total_reducer = self.norm_reducer, self.total_reducer
        optimizer.step(params, grads, lr)

    def _update(
        self, params: list[Tensor], grads: list[Tensor], state: dict[str, list[Any]], lr: float, *, fused: bool
    ) -> None:
        """Do nothing: the other optimizer does it."""

    def step_metrics(self) -> dict[str, float]:
        return self._optimizer.step_metrics()

    def state_tensors(self) -> dict[str, Tensor]:
        averages = zip(self._names, self._averages or (), strict=False)
        return self._optimizer.state_tensors() | {f"{name}.{AVERAGE}": average for name, average in averages}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        keys = [f"{name}.{AVERAGE}" for name in self._names]
        found = [tensors[key] for key in keys if key in tensors]
        if found and len(found) < len(keys):
            raise CheckpointError(f"The saved optimizer state lacks {next(key for key in keys if key not in tensors)}.")
        for key, saved, parameter in zip(keys, found, self._templates, strict=False):
            if saved.shape != parameter.shape:
                raise CheckpointError(
                    f"The saved optimizer state has {key!r} of shape {list(saved.shape)}; this model needs "
                    f"{list(parameter.shape)}."
                )
        self._optimizer.load_state_tensors({key: tensor for key, tensor in tensors.items() if key not in set(keys)})
        loaded = [
            torch.empty_like(parameter.detach()).copy_(saved)
            for saved, parameter in zip(found, self._templates, strict=False)
        ]
        self._averages = loaded or None
