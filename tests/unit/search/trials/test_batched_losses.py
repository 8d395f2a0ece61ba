"""Losses of many members at once are those of torch, computed with the classes before the samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from orchestray.search.trials.batched_losses import ShortRows

MEMBERS, SAMPLES, CLASSES = 3, 7, 5
TARGETS = torch.tensor([0, 4, 2, 2, 1, -100, 3])


class Shapes(TorchFunctionMode):
    """The shapes of the logits that `cross_entropy` is computed of."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.cross_entropy:
            self.seen.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


WAYS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "weights of classes": {"weight": torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64)},
    "smoothed": {"label_smoothing": 0.1},
    "another ignored target": {"ignore_index": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_loss_of_each_member_and_its_gradient_are_those_of_torch(way: str) -> None:
    named = WAYS[way]
    targets = TARGETS.clamp(min=0) if "ignore_index" in named else TARGETS
    logits = torch.randn(MEMBERS, SAMPLES, CLASSES, dtype=torch.float64, requires_grad=True)

    def loss(of: Tensor) -> Tensor:
        return functional.cross_entropy(of, targets, **named)

    with ShortRows():
        found = vmap(loss)(logits)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    wanted = torch.stack([loss(of) for of in logits])
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted.sum(), logits)[0], rtol=1e-12, atol=1e-14)


def test_classes_come_before_samples_for_logits_of_few_classes_alone() -> None:
    criterion = nn.CrossEntropyLoss()
    with Shapes() as shapes, ShortRows():
        criterion(torch.randn(SAMPLES, CLASSES), TARGETS)
        criterion(torch.randn(SAMPLES, 1000), TARGETS)
        functional.cross_entropy(torch.randn(2, CLASSES, SAMPLES), TARGETS.expand(2, -1))
        rows = functional.cross_entropy(torch.randn(SAMPLES, CLASSES), TARGETS, reduction="none")
    wanted = [(1, CLASSES, SAMPLES), (SAMPLES, 1000), (2, CLASSES, SAMPLES), (SAMPLES, CLASSES)]
    assert shapes.seen == wanted
    assert rows.shape == TARGETS.shape


def test_a_loss_of_each_sample_keeps_its_shape_however_it_is_asked_for() -> None:
    logits, targets = torch.randn(SAMPLES, CLASSES), TARGETS
    ways: list[Any] = [
        lambda: functional.cross_entropy(logits, targets, reduction="none"),
        lambda: functional.cross_entropy(logits, targets, None, None, -100, None, "none"),
    ]
    for way in ways:
        with ShortRows():
            found = way()
        torch.testing.assert_close(found, way(), rtol=0, atol=0)
