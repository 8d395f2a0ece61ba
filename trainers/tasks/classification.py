"""The loss and the metric that classification tasks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_MOST_CLASSES = 10


def cross_entropy(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of logits [samples, classes] and `targets` [samples]."""
    return nn.functional.cross_entropy(outputs, batch["targets"])


def named_classes(logits: Tensor, names: Sequence[Any]) -> dict[str, Any]:
    """Return the likeliest class of logits [classes], and the probabilities of the ten likeliest, as JSON values."""
    likeliest = logits.double().softmax(0).topk(min(_MOST_CLASSES, len(names)))
    found = {str(names[place]): float(value) for value, place in zip(*likeliest, strict=True)}
    return {"class": next(iter(found)), "probabilities": found}


def accuracy(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the fraction of samples whose largest logit is their target's."""
    return (outputs.argmax(dim=1) == batch["targets"]).to(torch.float32).mean()
