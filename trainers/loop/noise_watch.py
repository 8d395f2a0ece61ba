"""The gradient noise scale of a run, measured in its steps by the norms of the gradients of parts of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from orchestray.platform.errors import ConfigError
from orchestray.trainers.core.batch_norm import has_synchronized
from orchestray.trainers.optim.noise_scale import NoiseScale
from orchestray.trainers.optim.sparse import rows_once, values_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from orchestray.platform.data.stream import Share
    from orchestray.trainers.core.exchange import Exchange
    from orchestray.trainers.loop.replica import Replica


class NoiseWatch:
    """A watch over the gradients of one attempt. Every replica has the same numbers, bit for bit.

    Hooks take the norm of each gradient that a backward pass makes, before it is added to others. A part of the batch
    is what one worker computes in one backward pass: its share of a micro-batch. So two workers, one worker with two
    micro-batches, and any such mixture have the same parts, if these are equally large.
    """

    def __init__(self, replica: Replica) -> None:
        """
        Args:
            replica: replica to watch, whose settings have `noise_scale`.

        Raises:
            ConfigError: the parts' gradients depend on each other.
        """
        if replica.groups.data.size > 1 and has_synchronized(replica.model):
            raise ConfigError(
                "config: train.batch_norm: synchronized normalises by the samples of all workers, and so no worker has "
                "a gradient of its own, whose noise could be measured; use train.batch_norm: local"
            )
        self._position = replica.position
        self.scale = NoiseScale((replica.settings.noise_scale or {})["decay"], replica.position.noise)
        self._passes: list[list[Tensor]] = []
        self._hooks = [
            parameter.register_hook(self._take)  # type: ignore[no-untyped-call]
            for parameter in replica.model.parameters()
            if parameter.requires_grad
        ]

    def watched(self, exchange: Exchange) -> Exchange:
        """Return the exchange for the passes of a step: each `begin_backward` begins a part."""
        self._passes.clear()
        return cast("Exchange", _Watched(exchange, self._passes))

    def sums(self, share: Share) -> tuple[float, float]:
        """Return what is to be summed over the replicas before `add`: this worker's part, and its number of parts.

        Args:
            share: the share whose passes were watched.
        """
        total = count = 0.0
        for squares, micro_batch in zip(self._passes, share.micro_batches, strict=False):
            fraction = micro_batch.weight / share.batch_weight
            if fraction:
                # The gradient of a pass has the fraction as a factor already.
                total += float(torch.stack(squares).sum()) / fraction if squares else 0.0
                count += 1
        return total, count

    def add(self, sums: Sequence[float], gradients: Sequence[Tensor | None], batch_samples: int) -> dict[str, float]:
        """Add a step, and return its metrics.

        Args:
            sums: sums over the replicas of what `sums` returned.
            gradients: gradients of the whole batch.
            batch_samples: samples of the batch.
        """
        parts, num_parts = sums
        if num_parts > 1:
            squares = [_square(gradient) for gradient in gradients if gradient is not None]
            whole = float(torch.stack(squares).sum()) if squares else 0.0
            self.scale.add(parts, whole, int(num_parts), batch_samples)
        return self.scale.metrics(batch_samples)

    def keep(self) -> None:
        """Note what was measured in the position, once the step cannot fail any more: it may be made again."""
        self._position.noise = self.scale.state()

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


def _square(gradient: Tensor) -> Tensor:
    values = values_of(rows_once(gradient.detach()))
    norm = torch.linalg.vector_norm(values, dtype=torch.float64)
    square: Tensor = (norm * norm).cpu()
    return square
