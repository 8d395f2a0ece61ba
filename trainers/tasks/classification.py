"""The loss and the metric that classification tasks share."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def cross_entropy(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of logits [samples, classes] and `targets` [samples]."""
    return nn.functional.cross_entropy(outputs, batch["targets"])


def accuracy(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the fraction of samples whose largest logit is their target's."""
    return (outputs.argmax(dim=1) == batch["targets"]).to(torch.float32).mean()
