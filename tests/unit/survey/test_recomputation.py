"""Group B: activations that are computed again instead of being kept."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from orchestray.trainers.parallel.recompute import ActivationMeter, recompute


def convolutions(depth: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(layer for _ in range(depth) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()))
    )


def trained(model: nn.Module, images: Tensor, how: str) -> tuple[int, list[Tensor]]:
    """Return the most bytes of activations at once, and the gradients."""
    meter = ActivationMeter(model)
    recompute(model, how, meter=meter)
    with meter.watching(images):
        model(images).square().mean().backward()
    return meter.peak_bytes, [p.grad for p in model.parameters() if p.grad is not None]


def test_recompute_convolutional_operators_keeps_the_root_of_the_depth_and_the_same_bits() -> None:
    """Check Chen et al. 2016, section 4.1: O(sqrt n) activations for one forward pass more."""
    images = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    depths, kept, plainly = [4, 16, 64, 144], [], []
    for depth in depths:
        model = convolutions(depth)
        all_bytes, expected = trained(copy.deepcopy(model), images, "none")
        root_bytes, found = trained(model, images, "sqrt")
        assert len(found) == 4 * depth
        assert all(map(torch.equal, found, expected))
        plainly.append(all_bytes / depth)
        kept.append(root_bytes / math.sqrt(depth))
    assert max(plainly) < 1.2 * min(plainly)  # in proportion to the depth
    assert max(kept) < 1.5 * min(kept)  # in proportion to its root
