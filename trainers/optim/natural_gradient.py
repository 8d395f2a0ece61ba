"""NG-SGD: gradients multiplied by the inverse of the Fisher matrix, by each replica with one of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestray.trainers.optim.kfac import KFAC, Pair


class NaturalGradient(KFAC):
    """Natural-gradient SGD (Povey, Zhang and Khudanpur 2015, "Parallel training of DNNs with natural gradient").

    The Fisher matrix of a layer is the product of the factors of its inputs and of its errors, as in K-FAC. That of the
    errors is scaled to a mean eigenvalue of 1, so that the rate does not grow as the errors vanish. For a linear layer
    with a Gaussian output of unit variance the step is the exact F^-1 gradient.

    Replicas that average their weights now and then each have the Fisher matrix of their own samples.
    """

    def __init__(
        self,
        damping: float = 1e-2,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        decay: float = 0.95,
        every_steps: int = 4,
        groups: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """
        Args:
            damping: damping of the Fisher matrix.
            momentum: part of the last update that is kept.
            weight_decay: L2 penalty added to the gradient.
            decay: decay of the running means of the factors.
            every_steps: steps between two measurements, which are then inverted.
            groups: parameters with another penalty or rate, as in `KFAC`.
        """
        super().__init__(damping, momentum, weight_decay, decay, every_steps, every_steps, kl_clip=None, groups=groups)

    def _inverses(self, factors: Pair) -> Pair:
        inputs, errors = factors
        size = float(errors.trace()) / len(errors)
        return super()._inverses((inputs, errors / size if size > 0.0 else errors))
