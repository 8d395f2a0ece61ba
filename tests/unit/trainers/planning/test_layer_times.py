"""Each layer has the times of its own passes, and a model that is watched computes what it computes otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.trainers.planning.layer_times import LayerTimes

_SLOW_S = 0.05


class Slow(torch.autograd.Function):
    """The identity, whose backward pass takes long."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        time.sleep(_SLOW_S)
        return gradients[0]


class SlowLayer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        slowed: Tensor = Slow.apply(x)  # type: ignore[no-untyped-call]
        return slowed


class Skipped(nn.Module):
    """Two branches of the same input, of which one has a slow backward pass."""

    def __init__(self, slow: nn.Module, quick: nn.Module) -> None:
        super().__init__()
        self.first, self.slow, self.quick = nn.Linear(4, 4), slow, quick

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.slow(x) + self.quick(x)  # type: ignore[no-any-return]


def watched(model: nn.Module, x: Tensor) -> LayerTimes:
    times = LayerTimes({name: module for name, module in model.named_modules() if name})
    with times.watched():
        for number in range(2):
            with times.step(counts=number > 0):
                model(x).sum().backward()
    return times


def test_a_backward_pass_ends_with_the_layers_own_gradients_though_others_have_the_same_input() -> None:
    for model in (Skipped(SlowLayer(), nn.Sigmoid()), Skipped(nn.Sequential(SlowLayer()), nn.Sigmoid())):
        found = watched(model, torch.ones(2, 4)).backward_s
        slow = found.pop("slow" if "slow" in found else "slow.0")
        assert slow >= _SLOW_S
        assert {*found} == {"first", "quick"}
        assert max(found.values()) < slow, "a time that is not its own"


@pytest.mark.parametrize(
    ("make", "shape", "timed"),
    [
        (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1)), (2, 4, 3, 3), "012"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), *[nn.Linear(4, 4)] * 2), (2, 4), "012"),
        (
            lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
            (2, 3, 4),
            ("self_attn", "linear1", "linear2", "norm1", "norm2"),
        ),
    ],
)
def test_a_watched_model_has_the_gradients_that_it_has_otherwise(
    make: Callable[[], nn.Module], shape: tuple[int, ...], timed: Iterable[str]
) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.rand(shape)
    model(x).sum().backward()
    before = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    model.zero_grad()
    times = LayerTimes(dict(model.named_children()))
    with times.watched(), times.step(counts=True):
        model(x).sum().backward()
    assert all(map(torch.equal, before, (each.grad for each in model.parameters())))
    assert {*times.backward_s} == {*timed} <= {*times.forward_s}


def test_a_step_that_does_not_count_leaves_no_time_and_a_layer_without_gradients_has_no_backward_pass() -> None:
    model = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3))
    times = LayerTimes(dict(model.named_children()))
    with times.watched():
        with times.step(counts=False):
            model(torch.ones(1, 3)).sum().backward()
        assert times.forward_s == times.backward_s == {}
        with times.step(counts=True):
            model(torch.ones(1, 3)).sum().backward()
    assert {*times.forward_s} == {"0", "1"}
    assert {*times.backward_s} == {"1"}
