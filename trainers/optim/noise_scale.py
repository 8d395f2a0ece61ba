"""The gradient noise scale, from the norms of the gradients of parts of a batch and of the whole.

After McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), appendix A.1, for parts of any sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class NoiseScale:
    """Moving means of the variance of a sample's gradient, and of the squared norm of the expected gradient.

    A batch of B samples is cut into P parts. Part i has the fraction f_i of it and the mean gradient g_i. G_B is the
    mean gradient of the batch, and A = sum of f_i |g_i|^2. G is the expected gradient, and S the trace of the
    covariance of a sample's gradient. Then E A = |G|^2 + P S / B and E |G_B|^2 = |G|^2 + S / B. So

    - S = (A - |G_B|^2) B / (P - 1),
    - |G|^2 = |G_B|^2 - S / B,

    both without bias. Their ratio S / |G|^2 is biased, so each has a moving mean of its own.
    """

    def __init__(self, decay: float, state: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            decay: decay of the moving means, from 0 to below 1.
            state: earlier result of `state`, to go on from.
        """
        self._decay = decay
        self._trace, self._square, self._weight = 0.0, 0.0, 0.0
        self._best_steps, self._best_samples = 0.0, 0.0
        if state is not None:
            self._trace, self._square, self._weight = state["trace"], state["square"], state["weight"]
            self._best_steps, self._best_samples = state["best_steps"], state["best_samples"]

    def add(self, parts: float, whole: float, num_parts: int, batch_samples: int) -> None:
        """Add a batch of at least two parts.

        Args:
            parts: A: squared norms of the parts' mean gradients, weighted by their fractions of the batch.
            whole: squared norm of the batch's mean gradient.
            num_parts: number of parts, at least 2.
            batch_samples: samples of the batch.
        """
        trace = (parts - whole) * batch_samples / (num_parts - 1)
        kept = self._decay
        self._trace = kept * self._trace + (1.0 - kept) * trace
        self._square = kept * self._square + (1.0 - kept) * (whole - trace / batch_samples)
        self._weight = kept * self._weight + (1.0 - kept)
        scale = self.scale
        if scale is not None:
            progress = 1.0 / (1.0 + scale / batch_samples)
            self._best_steps += progress
            self._best_samples += progress * scale

    @property
    def trace(self) -> float:
        """Variance of a sample's gradient, summed over all parameters; 0 before the first batch."""
        return max(0.0, self._trace / self._weight) if self._weight else 0.0

    @property
    def square(self) -> float:
        """Squared norm of the expected gradient; it may be below 0 where noise hides it."""
        return self._square / self._weight if self._weight else 0.0

    @property
    def scale(self) -> float | None:
        """The noise scale, in samples; None if the noise hides the gradient."""
        return self.trace / self.square if self.square > 0 else None

    @property
    def critical_batch(self) -> float | None:
        """The critical batch size of the run so far, in samples; None before there is a noise scale.

        It is the mean of the noise scale over the run's progress (section 2.3 and appendix D). A step counts as
        1 / (1 + noise scale / batch) of a step with the exact gradient.
        """
        return self._best_samples / self._best_steps if self._best_steps else None

    def metrics(self, batch_samples: int) -> dict[str, float]:
        """Return `gradient_variance` of batches of this size, `noise_scale` and `critical_batch`, as far as known."""
        known = {"noise_scale": self.scale, "critical_batch": self.critical_batch}
        found = {name: value for name, value in known.items() if value is not None}
        return {"gradient_variance": self.trace / batch_samples, **found} if self._weight else {}

    def state(self) -> dict[str, float]:
        """Return what to go on from, as JSON values."""
        return {
            "trace": self._trace,
            "square": self._square,
            "weight": self._weight,
            "best_steps": self._best_steps,
            "best_samples": self._best_samples,
        }
