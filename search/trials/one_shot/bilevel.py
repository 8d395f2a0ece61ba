"""The architecture gradient of DARTS: of the loss on the architecture's data, after a training step of the weights.

Liu et al., "DARTS: Differentiable Architecture Search", ICLR 2019, section 2.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Loss = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
"""Loss as a function of the weights and the architecture."""

_EPSILON = 0.01
"""Step size of the finite difference (section 2.3, footnote 2)."""


def architecture_gradient(
    train_loss: Loss,
    judge_loss: Loss,
    weights: Sequence[Tensor],
    alphas: Sequence[Tensor],
    *,
    weights_lr: float = 0.0,
) -> list[Tensor]:
    """Return the gradient in alpha of judge_loss(w - weights_lr * d train_loss(w, alpha) / dw, alpha).

    With `weights_lr` 0 this is the first-order approximation. Otherwise (equations 7 and 8), with w' the weights after
    the step and w+- = w +- e d judge_loss(w', alpha) / dw':

        d judge_loss(w', alpha) / d alpha
            - weights_lr (d train_loss(w+, alpha) / d alpha - d train_loss(w-, alpha) / d alpha) / 2 e

    Args:
        train_loss: loss on the data of the weights.
        judge_loss: loss on the data of the architecture.
        weights: weights of the network.
        alphas: parameters of the architecture.
        weights_lr: learning rate of the look-ahead step.
    """
    leaves = [alpha.detach().requires_grad_() for alpha in alphas]
    if not weights_lr:
        return _grads(judge_loss([w.detach() for w in weights], leaves), leaves)
    points = [weight.detach().requires_grad_() for weight in weights]
    descent = _grads(train_loss(points, [alpha.detach() for alpha in alphas]), points)
    ahead = [(w.detach() - weights_lr * d).requires_grad_() for w, d in zip(weights, descent, strict=True)]
    both = _grads(judge_loss(ahead, leaves), [*leaves, *ahead])
    direct, pull = both[: len(leaves)], both[len(leaves) :]
    norm = torch.stack([part.square().sum() for part in pull]).sum().sqrt()
    if not norm > 0:
        return direct
    epsilon = float(_EPSILON / norm)

    def slope(sign: float) -> list[Tensor]:
        moved = [w.detach() + sign * epsilon * d for w, d in zip(weights, pull, strict=True)]
        return _grads(train_loss(moved, leaves), leaves)

    differences = zip(direct, slope(1.0), slope(-1.0), strict=True)
    return [first - weights_lr * (above - below) / (2 * epsilon) for first, above, below in differences]


def _grads(loss: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, leaves, materialize_grads=True, allow_unused=True))
