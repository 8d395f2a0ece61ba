"""Gradients kept as factors up to the update: the same bits as gradients that were made, and made where need be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from orchestray.trainers.ps.protocol.partition import trainable
from orchestray.trainers.ps.variants.hogwild import hogwild
from orchestray.trainers.ps.variants.hogwild.fused_low_rank_update import LowRankUpdate, add_product
from support.central_run import train_central
from support.layouts import layout_settings, train_laid_out
from support.training import digits, same_bits

WIDTH = 512  # of float32: a square of it is large enough


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(self.inner(inputs).tanh())
        return outputs


class Tied(nn.Module):
    """A layer whose weight is used elsewhere, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(inputs) @ self.inner.weight
        return outputs


def once() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    return model


def gradients_of(make: Callable[[], nn.Module], num_rows: int, *, is_on: bool = True) -> tuple[list[int], bool]:
    """Return the places that have factors, and True if all gradients are those of the plain model."""
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    model = make()
    factors, inputs = LowRankUpdate(model, trainable(model)), torch.randn(num_rows, WIDTH)
    factors.begin(is_on=is_on)
    for one in (plain, model):
        one(inputs).square().mean().backward()
    found: list[Tensor | None] = [parameter.grad for parameter in model.parameters()]
    kept = factors.take(found)
    for place, (outer, inner) in kept.items():
        assert found[place] is None
        found[place] = outer.t().mm(inner)
    wanted = [parameter.grad for parameter in plain.parameters()]
    return sorted(kept), all(
        a is not None and b is not None and torch.equal(a, b) for a, b in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize(
    ("make", "num_rows", "is_on", "kept"),
    [
        (once, 4, True, [0]),
        (once, 4, False, []),
        (once, WIDTH, True, []),
        (Twice, 4, True, []),
        (Tied, 4, True, []),
        (hooked, 4, True, []),
    ],
    ids=["used once", "off", "many rows", "used twice", "tied", "somebody listens"],
)
def test_weights_used_once_leave_factors_and_all_others_the_gradient_as_ever(
    make: Callable[[], nn.Module], num_rows: int, is_on: bool, kept: list[int]
) -> None:
    assert gradients_of(make, num_rows, is_on=is_on) == (kept, True)


@pytest.mark.parametrize("num_outputs", [8, 64, 200, 512])
@pytest.mark.parametrize("num_rows", [1, 4, 33])
def test_an_update_some_rows_at_a_time_is_that_by_the_whole_product_bit_for_bit(
    num_outputs: int, num_rows: int
) -> None:
    torch.manual_seed(1)
    weight, factors = torch.randn(num_outputs, 333), (torch.randn(num_rows, num_outputs), torch.randn(num_rows, 333))
    whole = weight.clone()
    hogwild._descend([whole], [factors[0].t().mm(factors[1])], 0.1)
    add_product(weight, factors, lambda rows, part: hogwild._descend([rows], [part], 0.1))
    assert torch.equal(weight, whole)


def test_one_worker_with_a_large_layer_is_the_single_process_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_products: list[int] = []

    def counted(*arguments: object) -> None:
        num_products.append(1)
        add_product(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(hogwild, "add_product", counted)
    exchange = {"type": "parameter_server", "consistency": "asynchronous", "transport": "shared_memory"}
    train = {"steps": 4, "batch_size": 12, "optimizer": {"type": "sgd", "lr": 0.1}}
    one = train_laid_out(lambda: digits(hidden=[2048]), layout_settings({"microbatches": 1}, **train))
    settings = layout_settings({"data": 1, "microbatches": 1}, exchange, **train)
    found = train_central(lambda: digits(hidden=[2048]), settings, tmp_path)
    assert len(num_products) == 4
    assert same_bits(found.weights, one.weights)
