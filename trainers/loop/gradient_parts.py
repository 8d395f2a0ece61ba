"""Squared norms of the gradients of parts of a batch, one for each backward pass, before any are added up."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from orchestray.platform.errors import ConfigError
from orchestray.trainers.core.batch_norm import has_synchronized
from orchestray.trainers.optim.sparse import rows_once, values_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from orchestray.platform.data.stream import Share
    from orchestray.trainers.core.exchange import Exchange


class GradientParts:
    """Hooks that take the norm of each gradient that a backward pass makes, before it is added to others.

    A part of the batch is what one worker computes in one backward pass: its share of a micro-batch. So two workers,
    one worker with two micro-batches, and any such mixture have the same parts, if these are equally large.
    """

    def __init__(self, model: nn.Module, num_replicas: int) -> None:
        """
        Args:
            model: the model on this worker.
            num_replicas: number of replicas that share a batch.

        Raises:
            ConfigError: the parts' gradients depend on each other.
        """
        if num_replicas > 1 and has_synchronized(model):
            raise ConfigError(
                "config: train.batch_norm: synchronized normalises by the samples of all workers, and so no worker has "
                "a gradient of its own, whose noise could be measured; use train.batch_norm: local"
            )
        self._passes: list[list[Tensor]] = []
        self._hooks = [
            parameter.register_hook(self._take)  # type: ignore[no-untyped-call]
            for parameter in model.parameters()
            if parameter.requires_grad
        ]

    def watched(self, exchange: Exchange) -> Exchange:
        """Return the exchange for the passes of a step: each `begin_backward` begins a part."""
        self._passes.clear()
        return cast("Exchange", _Watched(exchange, self._passes))

    def sums(self, share: Share) -> tuple[float, float]:
        """Return this worker's part of `NoiseScale.add`'s first argument, and its number of parts.

        Args:
            share: the share whose passes were watched.
        """
        total = count = 0.0
        for squares, micro_batch in zip(self._passes, share.micro_batches, strict=False):
            fraction = share.fraction(micro_batch.weight)
            if fraction:
                # The gradient of a pass has the fraction as a factor already.
                total += float(torch.stack(squares).sum()) / fraction if squares else 0.0
                count += 1
        return total, count

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _take(self, gradient: Tensor) -> None:
        if self._passes:
            self._passes[-1].append(_square(gradient))


class _Watched:
    """An exchange as a network uses it: `begin_backward` is all that it calls."""

    def __init__(self, exchange: Exchange, passes: list[list[Tensor]]) -> None:
        self._exchange, self._passes = exchange, passes

    def begin_backward(self, last_micro_batch: bool) -> None:
        self._passes.append([])
        self._exchange.begin_backward(last_micro_batch)


def squared_norm(gradients: Sequence[Tensor | None]) -> float:
    """Return the squared 2-norm of gradients together."""
    squares = [_square(gradient) for gradient in gradients if gradient is not None]
    return float(torch.stack(squares).sum()) if squares else 0.0


def _square(gradient: Tensor) -> Tensor:
    values = values_of(rows_once(gradient.detach()))
    norm = torch.linalg.vector_norm(values, dtype=torch.float64)
    square: Tensor = (norm * norm).cpu()
    return square
