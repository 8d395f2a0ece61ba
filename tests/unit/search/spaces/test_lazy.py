"""A space of one's own may build with lazy modules, which find their shapes from what comes in."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from orchestray.search.spaces.registry import built


class _Lazy:
    def build(self, genome: int, input_shape: Any, num_outputs: int) -> nn.Module:
        normed = nn.Sequential(nn.Flatten(), nn.LazyLinear(genome), nn.LazyBatchNorm1d(), nn.ReLU())
        return nn.Sequential(normed, nn.LazyLinear(num_outputs))


def test_lazy_modules_have_their_shapes_and_the_same_weights_for_the_same_seed() -> None:
    torch.manual_seed(3)
    one = built(_Lazy(), 5, (1, 4, 4), 2)  # type: ignore[arg-type]  # a space that only builds
    torch.manual_seed(3)
    other = built(_Lazy(), 5, (1, 4, 4), 2)  # type: ignore[arg-type]
    assert [tuple(weight.shape) for weight in one.parameters()] == [(5, 16), (5,), (5,), (5,), (2, 5), (2,)]
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert one.training
    assert all(module.training for module in one.modules())
    assert torch.equal(one[0][2].running_mean, torch.zeros(5))  # type: ignore[index]  # nothing was learned from it


def test_lazy_modules_are_built_on_the_meta_device_too() -> None:
    with torch.device("meta"):
        network = built(_Lazy(), 5, (1, 4, 4), 2)  # type: ignore[arg-type]
    assert sum(weight.numel() for weight in network.parameters()) == 5 * 17 + 10 + 12
