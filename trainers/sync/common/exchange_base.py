"""The base of the exchanges: the attachment to a model, and default methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn, strided

from orchestray.platform.comm.collective import Collective
from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.trainers.core.exchange import MAX_EXTRAS, LocalTensor, OptimizedTensor
from orchestray.trainers.layout.tensor_slice import TensorSlice
from orchestray.trainers.sync.common.local_tensors import held_tensors, updated_whole, with_present_buffers


class ExchangeBase(ABC):
    """An `Exchange` that leaves gradients in the parameters' `grad`, keeps nothing else and reports nothing.

    A subclass adds `finish`.
    """

    diverges = False
    shares_batch = True
    shared_names: Collection[str] = ()
    takes_complex = False
    """True if replicas may train complex numbers."""

    def __init__(self) -> None:
        self.samples_after: Callable[[int], int] = int
        self.fraction = 1.0
        self.step_metrics: dict[str, float] = {}
        self.bytes_saved = self.asked_bytes = self.bytes_beyond = 0
        self._collective: Collective | None = None
        self._parameters: list[Tensor] = []
        """Parameters that are trained."""
        self._attached: nn.Module | None = None
        """Model whose buffers are looked up."""
        self._held: dict[str, LocalTensor] = {}
        self._updates: list[OptimizedTensor] = []

    def attach(self, model: nn.Module, collective: Collective, pieces: Mapping[str, TensorSlice] | None = None) -> None:
        self.detach()
        self._collective = collective
        self._hold(model, collective, pieces)

    def _hold(
        self, model: nn.Module, collective: Collective, pieces: Mapping[str, TensorSlice] | None
    ) -> dict[str, LocalTensor]:
        """Set what this worker holds and updates if nothing is sharded.

        Returns:
            What it holds, counted by every replica; in `held` the first counts it.

        Raises:
            ConfigError: it cannot exchange a parameter of complex numbers.
        """
        self._attached = model
        for name, parameter in model.named_parameters():
            if parameter.is_complex() and collective.size > 1 and not self.takes_complex:
                raise ConfigError(
                    f"config: strategy.exchange.type: the parameter {name!r} is of complex numbers, which only sums of "
                    "whole gradients and sharding can exchange; use allreduce without compression or aggregation, or "
                    "strategy.network.data: 1"
                )
        own = held_tensors(model, pieces)
        first = collective.rank == 0
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._held = {name: LocalTensor(held.tensor, held.piece.counted(first)) for name, held in own.items()}
        self._updates = updated_whole(model, self._held)
        return own

    def detach(self) -> None:
        self._clear_gradients()
        self._parameters = []
        self._collective = None

    def joined(self) -> Collective:
        """Return the collective; raise TrainingError if the exchange is not attached."""
        if self._collective is None:
            raise TrainingError("The exchange is not attached to a model and a collective.")
        return self._collective

    def updates(self) -> list[OptimizedTensor]:
        return self._updates

    def gradients(self) -> list[Tensor | None]:
        gradients = [parameter.grad for parameter in self._parameters]
        return [each if each is None or each.layout is strided else each.coalesce() for each in gradients]

    def held(self) -> dict[str, LocalTensor]:
        if self._attached is None:
            return self._held
        is_first = self._collective is None or self._collective.rank == 0
        return with_present_buffers(self._attached, self._held, is_first=is_first)

    @abstractmethod
    def finish(self, extras: Sequence[float | Tensor]) -> list[float]:
        """Wait until every `.grad` holds the gradient that the scheme updates from, as `Exchange` says."""

    def before_step(self, step: int) -> None:
        self._clear_gradients()

    def begin_backward(self, last_micro_batch: bool) -> None:
        return

    def rest(self) -> None:
        return

    def after_step(self, step: int) -> None:
        return

    def own(self) -> dict[str, LocalTensor]:
        return {}

    def consensus(self) -> AbstractContextManager[None]:
        return nullcontext()

    def agree(self) -> None:
        return

    def state(self) -> dict[str, LocalTensor]:
        return {}

    def wanted(self) -> dict[str, TensorSlice]:
        return {name: held.piece for name, held in self.state().items()}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        for name, held in self.state().items():
            held.tensor.copy_(tensors[name])

    def summary(self) -> dict[str, Any]:
        return {}

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _alone(self, extras: Sequence[float | Tensor]) -> list[float]:
        """Return what `finish` does where nothing is summed: this replica's own numbers."""
        if len(extras) > MAX_EXTRAS:
            raise ValueError(f"At most {MAX_EXTRAS} numbers ride along with the gradients; got {len(extras)}.")
        self.joined()
        return [float(extra) for extra in extras]
