"""The gradient noise scale of a run, measured in its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.trainers.loop.gradient_parts import GradientParts, squared_norm
from orchestray.trainers.optim.noise_scale import NoiseScale

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from orchestray.platform.data.stream import Share
    from orchestray.trainers.core.exchange import Exchange
    from orchestray.trainers.loop.replica import Replica


class NoiseWatch:
    """A watch over the gradients of one attempt. Every replica has the same numbers, bit for bit."""

    def __init__(self, replica: Replica) -> None:
        """
        Args:
            replica: replica to watch, whose settings have `noise_scale`.

        Raises:
            ConfigError: its model does not allow it.
        """
        self._position = replica.position
        decay = (replica.settings.noise_scale or {})["decay"]
        self.scale = NoiseScale(decay, replica.position.noise)
        self._parts = GradientParts(replica.model, replica.groups.data.size)

    def watched(self, exchange: Exchange) -> Exchange:
        """Return the exchange for the passes of a step."""
        return self._parts.watched(exchange)

    def sums(self, share: Share) -> tuple[float, float]:
        """Return what is to be summed over the replicas before `add`; call it once after the passes of a share."""
        return self._parts.sums(share)

    def add(self, sums: Sequence[float], gradients: Sequence[Tensor | None], batch_samples: int) -> dict[str, float]:
        """Add a step, and return its metrics.

        Args:
            sums: sums over the replicas of what `sums` returned.
            gradients: gradients of the whole batch.
            batch_samples: samples of the batch.
        """
        parts, num_parts = sums
        if num_parts > 1:
            self.scale.add(parts, squared_norm(gradients), int(num_parts), batch_samples)
        return self.scale.metrics(batch_samples)

    def keep(self) -> None:
        """Note what was measured in the position, once the step cannot fail any more: it may be made again."""
        self._position.noise = self.scale.state()

    def close(self) -> None:
        """Remove the hooks."""
        self._parts.close()
