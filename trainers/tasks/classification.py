"""What tasks that tell classes apart have in common."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def cross_entropy(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of logits [samples, classes] against `targets` [samples]."""
    return nn.functional.cross_entropy(outputs, batch["targets"])


def accuracy(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Part of the samples whose greatest logit is their target's."""
    return (outputs.argmax(dim=1) == batch["targets"]).to(torch.float32).mean()
