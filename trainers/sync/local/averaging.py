"""Local SGD: replicas train alone and take the mean of their parameters every few steps, or once, at the end.

Periodic averaging: McDonald, Hall and Mann, "Distributed Training Strategies for the Structured Perceptron" (2010);
Stich, "Local SGD Converges Fast and Communicates Little" (2019), algorithm 1. Once at the end: Zinkevich et al.,
"Parallelized Stochastic Gradient Descent" (2010), algorithm 3 (ParallelSGD). With an outer optimizer: Douillard et al.,
"DiLoCo" (2023), algorithm 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.platform.errors import ConfigError
from orchestray.trainers.core.exchange import LocalTensor
from orchestray.trainers.core.unread import read_together
from orchestray.trainers.layout.tensor_slice import TensorSlice
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.sync.common.local_tensors import held_slots, wanted_slots
from orchestray.trainers.sync.common.local_updates import LocalUpdates


class Averaging(LocalUpdates):
    """Replicas that train alone; every `every` steps, and at the end, all take the mean.

    Args:
        every: steps between two meetings; "end": only one, at the end.
        outer_optimizer: section like `train.optimizer`. Its gradient is the negative of the mean's move since the last
            meeting, and its parameters are those of the last meeting. None: the mean itself is taken, which is plain
            gradient descent with a rate of 1.
        unit: what `every` counts: "steps", or "samples" of all replicas together. The replicas meet after each step
            in which the count passes a multiple of `every`.
    """

    def __init__(
        self,
        every: int | Literal["end"] = 1,
        outer_optimizer: Mapping[str, Any] | None = None,
        unit: Literal["steps", "samples"] = "steps",
    ) -> None:
        super().__init__()
        self._counts_samples = unit == "samples"
        self._every = None if every == "end" else int(every)
        self._outer_lr = float((outer_optimizer or {}).get("lr", 1.0))
        self._outer = make_optimizer(**outer_optimizer) if outer_optimizer else None
        self._met_at: list[Tensor] = []
        """Trainable parameters at the last meeting, with an outer optimizer."""
        self._met = True
        """True if the replicas are the same now."""
        self._mean: list[Tensor] = []
        """Mean of the shared tensors as they are now, once it was computed."""
        self._num_steps = self._num_meetings = 0

    def run_report(self) -> dict[str, int]:
        """Return the number of `steps` and of `meetings` after one; empty before the first step."""
        return {"steps": self._num_steps, "meetings": self._num_meetings} if self._num_steps else {}

    def attach(self, model: nn.Module, collective: Collective, pieces: Mapping[str, TensorSlice] | None = None) -> None:
        super().attach(model, collective, pieces)
        self._check_outer()
        self._met = True
        self._met_at, self._mean = [], []

    def _check_outer(self) -> None:
        """Refuse an outer optimizer that would have to see more than this worker's parts."""
        outer = self._outer
        if outer is None or not (outer.needs_whole or outer.mixes_parameters):
            return
        part = next((update.name for update in self._updates if not update.piece.is_whole), None)
        if part is not None or outer.mixes_parameters:
            raise ConfigError(
                "config: strategy.exchange.outer_optimizer.type: it looks at whole parameters, or at several, and here "
                f"it would see {'each alone' if part is None else f'a part of {part!r}'}; use another optimizer"
            )

    def before_step(self, step: int) -> None:
        super().before_step(step)
        self._starts()
        self._num_steps += 1
        self.step_metrics, self._met, self._mean = {}, False, []

    def after_step(self, step: int) -> None:
        if self._every is None:
            return
        count = self.samples_after if self._counts_samples else int
        if count(step) // self._every > count(step - 1) // self._every:
            self.meet()

    @torch.no_grad()
    def meet(self) -> None:
        """Take the mean on all replicas, or what the outer optimizer makes of it."""
        mine = [tensor.clone() for tensor in self._shared]
        self._num_meetings += 1
        self.average()
        self.step_metrics = {"disagreement": distance(mine, self._shared)}
        if self._outer is not None:
            parameters: list[Tensor] = [parameter.detach() for parameter in self._parameters]
            moves: list[Tensor | None] = list(torch._foreach_sub(self._met_at, parameters))
            self._outer.step(self._met_at, moves, self._outer_lr)
            torch._foreach_copy_(parameters, self._met_at)
        self._met = True

    def average(self) -> None:
        """Overwrite the shared tensors by their mean over the replicas, the same bits on each of them."""
        self.take_mean(self._shared)

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        if self._met:  # they agree as they are
            yield
            return
        with super().consensus():
            yield

    @torch.no_grad()
    def agree(self) -> None:
        """Take the mean permanently; a mean computed since the last step (for a
        validation or a checkpoint) is not sent again.
        """
        if self._met:
            return
        if not self._mean:
            super().agree()
            self._mean = [tensor.clone() for tensor in self._shared]
        torch._foreach_copy_(self._shared, self._mean)

    def state(self) -> dict[str, LocalTensor]:
        kept = {"met": LocalTensor(torch.tensor(float(self._met)), TensorSlice.whole("met", ()))}
        if self._outer is not None:
            kept |= {f"met_at.{name}": held for name, held in self._starts().items()}
            kept |= {f"outer.{key}": held for key, held in held_slots(self._outer, self._updates).items()}
        return kept

    def wanted(self) -> dict[str, TensorSlice]:
        wanted = {"met": TensorSlice.whole("met", ())}
        if self._outer is not None:
            wanted |= {f"met_at.{name}": held.piece for name, held in self._starts().items()}
            wanted |= {f"outer.{key}": piece for key, piece in wanted_slots(self._outer, self._updates).items()}
        return wanted

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        self._met = bool(tensors["met"])
        if self._outer is not None:
            for name, held in self._starts().items():
                held.tensor.copy_(tensors[f"met_at.{name}"])
            slots = {key.removeprefix("outer."): tensor for key, tensor in tensors.items() if key.startswith("outer.")}
            self._outer.load_state_tensors(slots)

    def _starts(self) -> dict[str, LocalTensor]:
        """Return the parameters of the last meeting; before the first step those that training begins from."""
        if self._outer is None:
            return {}
        if not self._met_at:  # not when attached: a checkpoint may have been loaded since
            self._met_at = [parameter.detach().clone() for parameter in self._parameters]
            self._outer.init([(update.name, start) for update, start in zip(self._updates, self._met_at, strict=True)])
        starts = zip(self._updates, self._met_at, strict=True)
        return {update.name: LocalTensor(start, update.piece) for update, start in starts}


def distance(tensors: list[Tensor], others: list[Tensor]) -> float:
    """Return the 2-norm of the difference of two lists of tensors."""
    squares = [(a.double() - b.double()).square().sum() for a, b in zip(tensors, others, strict=True)]
    return float(sum(read_together(squares)) ** 0.5)
