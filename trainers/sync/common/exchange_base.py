"""Bases of the exchanges: the attachment to a model, default methods, and the bytes that a collective counts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.trainers.core.exchange import MAX_EXTRAS, LocalTensor, OptimizedTensor
from orchestray.trainers.layout.tensor_slice import TensorSlice
from orchestray.trainers.optim.sparse import rows_once
from orchestray.trainers.sync.common.local_tensors import held_tensors, updated_whole, with_present_buffers


class ExchangeBase(ABC):
    """An `Exchange` that leaves gradients in the parameters' `grad`, keeps nothing else and reports nothing.

    A subclass adds `finish` and the counts of bytes.
    """

    diverges = False
    shares_batch = True
    shared_names: Collection[str] = ()
    takes_complex = False
    """True if replicas may train complex numbers."""

    def __init__(self) -> None:
        self.samples_after: Callable[[int], int] = int
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
        return [None if (gradient := parameter.grad) is None else rows_once(gradient) for parameter in self._parameters]

    def held(self) -> dict[str, LocalTensor]:
        if self._attached is None:
            return self._held
        is_first = self._collective is None or self._collective.rank == 0
        return with_present_buffers(self._attached, self._held, is_first=is_first)

    def before_step(self, step: int) -> None:
        self._clear_gradients()

    def begin_backward(self, last_micro_batch: bool) -> None:
        return

    def weigh(self, fraction: float) -> None:
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

    def step_metrics(self) -> dict[str, float]:
        return {}

    def summary(self) -> dict[str, Any]:
        return {}

    @property
    @abstractmethod
    def bytes_sent_total(self) -> int:
        """Bytes that this replica sent since the exchange was created."""

    @property
    def bytes_dense_total(self) -> int:
        return self.bytes_sent_total

    @property
    def asked_bytes(self) -> int:
        return 0

    @property
    def bytes_beyond(self) -> int:
        return 0

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _check_extras(self, extras: Sequence[float]) -> None:
        """Raise if `finish` must not be called, or not with these extras."""
        if len(extras) > MAX_EXTRAS:
            raise ValueError(f"At most {MAX_EXTRAS} numbers ride along with the gradients; got {len(extras)}.")
        self.joined()


class CountedByCollective(ExchangeBase):
    """An exchange that sends by operations of its collective alone, which counts their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes_before = 0
        self._bytes_told = 0
        self._bytes_of_earlier = 0

    def attach(self, model: nn.Module, collective: Collective, pieces: Mapping[str, TensorSlice] | None = None) -> None:
        super().attach(model, collective, pieces)
        self._bytes_before = self._bytes_told = collective.own_bytes_sent

    def detach(self) -> None:
        if self._collective is not None:
            self._bytes_of_earlier = self.bytes_sent_total
        super().detach()

    def before_step(self, step: int) -> None:
        self._clear_gradients()
        self._bytes_told = self.joined().own_bytes_sent

    @property
    def bytes_sent(self) -> int:
        return self.joined().own_bytes_sent - self._bytes_told

    @property
    def bytes_sent_total(self) -> int:
        if self._collective is None:
            return self._bytes_of_earlier
        return self._bytes_of_earlier + self._collective.own_bytes_sent - self._bytes_before
