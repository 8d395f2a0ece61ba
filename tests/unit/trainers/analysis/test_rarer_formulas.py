"""Operations beside products and reductions have the costs of their definitions, and none of torch's usual layers is
left uncounted.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.trainers.analysis.trace import traced

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "hardswish": nn.Hardswish,
    "leaky": nn.LeakyReLU,
    "elu": nn.ELU,
    "prelu": nn.PReLU,
    "rrelu": nn.RReLU,
    "log_sigmoid": nn.LogSigmoid,
    "glu": lambda: nn.GLU(1),
    "bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "bicubic": lambda: nn.Upsample(scale_factor=2, mode="bicubic"),
    "nearest": lambda: nn.Upsample(scale_factor=2),
    "adaptive": lambda: nn.AdaptiveMaxPool2d(2),
    "reflection": lambda: nn.ReflectionPad2d(1),
    "unfold": lambda: nn.Unfold(3),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_both_passes_of_a_layer_are_counted_whole(name: str) -> None:
    layer = LAYERS[name]().to("meta").train()
    x = torch.zeros(2, 8, 8, 8, device="meta", requires_grad=True)
    graph = traced(lambda: layer(x).sum().backward())
    assert graph.uncounted == {}
    assert any(each.is_backward and each.cost.work for each in graph.operations)


def work_of(name: str, compute: Callable[[], Tensor]) -> tuple[int, int, int]:
    """Return the multiplications, additions and depth of the one operation of a name."""
    (found,) = (each.cost for each in traced(compute).operations if each.name == name)
    return found.multiplications, found.additions, found.depth


def test_an_interpolated_value_is_a_sum_of_its_taps() -> None:
    x = torch.zeros(2, 3, 4, 4, device="meta")
    bilinear = work_of("upsample_bilinear2d", lambda: functional.interpolate(x, scale_factor=2, mode="bilinear"))
    assert bilinear == (4 * 2 * 3 * 8 * 8, 3 * 2 * 3 * 8 * 8, 3)
    bicubic = work_of("upsample_bicubic2d", lambda: functional.interpolate(x, scale_factor=2, mode="bicubic"))
    assert bicubic == (16 * 2 * 3 * 8 * 8, 15 * 2 * 3 * 8 * 8, 5)


def test_a_distance_is_a_sum_of_squared_differences_and_a_bag_a_sum_of_its_words() -> None:
    a, b = torch.zeros(5, 8, device="meta"), torch.zeros(6, 8, device="meta")
    products, additions, depth = work_of("_cdist_forward", lambda: torch.cdist(a, b))
    assert (products, additions, depth) == (5 * 6 * 8, 5 * 6 * (8 + 7), 2 + 3 + 1)
    bags = nn.EmbeddingBag(9, 4).to("meta")
    words = torch.zeros(2, 3, dtype=torch.int64, device="meta")
    assert work_of("_embedding_bag", lambda: bags(words))[1] == 2 * 4 * (3 - 1)


def test_a_loss_on_logits_is_counted_for_each_value() -> None:
    x, y = torch.zeros(4, 8, device="meta"), torch.zeros(4, 8, device="meta")
    graph = traced(lambda: functional.binary_cross_entropy_with_logits(x, y))
    assert graph.uncounted == {}
    assert graph.work >= 9 * 32
