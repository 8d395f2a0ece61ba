"""Branches on several workers are the whole block, and workers meet twice a block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.platform.errors import ConfigError
from orchestray.trainers.parallel.tensor.branches import Branches, deal
from support.split_training import Run, check_same, train_split


def images(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def of(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*layers).double()


class Unit(nn.Module):
    """Convolution, normalisation, ReLU, as torchvision writes them."""

    def __init__(self, inputs: int, outputs: int, **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, bias=False, **options)
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.bn(self.conv(x)), inplace=True)


class Inception(nn.Module):
    """Four paths, as in torchvision's InceptionA: pooling is a function, and a list is concatenated."""

    def __init__(self, inputs: int, pooled: int = 3) -> None:
        super().__init__()
        self.branch1x1 = Unit(inputs, 4, kernel_size=1)
        self.branch5x5_1 = Unit(inputs, 3, kernel_size=1)
        self.branch5x5_2 = Unit(3, 4, kernel_size=5, padding=2)
        self.branch3x3_1 = Unit(inputs, 3, kernel_size=1)
        self.branch3x3_2 = Unit(3, 5, kernel_size=3, padding=1)
        self.branch_pool = Unit(inputs, pooled, kernel_size=1)

    def paths(self, x: Tensor) -> list[Tensor]:
        pooled = functional.avg_pool2d(x, kernel_size=3, stride=1, padding=1)
        return [
            self.branch1x1(x),
            self.branch5x5_2(self.branch5x5_1(x)),
            self.branch3x3_2(self.branch3x3_1(x)),
            self.branch_pool(pooled),
        ]

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(self.paths(x), 1)


class Residual(nn.Module):
    """A sum with what came in, and something after the merge."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.Dropout(0.3))
        self.second = nn.Conv2d(channels, channels, 1)
        self.after = nn.Conv2d(channels, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(functional.relu(x + self.first(x) + self.second(x)))


def towers(count: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Conv2d(2, 2 + index, 3, padding=1), nn.Tanh()) for index in range(count)]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_inception_branches_train_as_the_block_in_one_process(size: int) -> None:
    model = of(nn.Conv2d(1, 3, 1), Inception(3), Inception(16), nn.Flatten(), nn.Linear(16 * 25, 2))
    plain, workers = check_same(model, {"1": "branches", "2": "branches"}, size, Run(images(3, 1, 5, 5), num_steps=3))
    for worker in workers:
        assert worker.split is not None
        assert not worker.split.partial
    # A worker holds its branches' parameters alone: of the blocks' nothing is held twice.
    blocks = sum(value.numel() for name, value in plain.gradients.items() if name[0] in "12")
    held = [sum(value.numel() for name, value in worker.gradients.items() if name[0] in "12") for worker in workers]
    assert sum(held) == blocks
    assert max(held) < 0.8 * blocks


@pytest.mark.parametrize(("merge", "count"), [("concat", 1), ("concat", 2), ("concat", 5), ("sum", 2), ("sum", 5)])
@pytest.mark.parametrize("size", [2, 3])
def test_fewer_and_more_branches_than_workers(size: int, merge: Any, count: int) -> None:
    branches = towers(count) if merge == "concat" else [nn.Conv2d(2, 3, 3) for _ in range(count)]
    model = of(Branches(branches, merge), nn.Tanh())
    check_same(model, {"0": "branches"}, size, Run(images(2, 2, 5, 4)))
    # The block may be the first that learns, and the worker without a branch must still go backward.
    check_same(model, {"0": "branches"}, size, Run(images(2, 2, 5, 4), inputs_need_gradient=False))


@pytest.mark.parametrize("size", [2, 3])
def test_a_residual_sum_and_what_follows_it_are_recognised(size: int) -> None:
    plain, workers = check_same(of(nn.Conv2d(1, 3, 1), Residual(3)), {"1": "branches"}, size, Run(images(2, 1, 5, 5)))
    assert all(worker.state["1.after.weight"].numel() == plain.state["1.after.weight"].numel() for worker in workers)


def test_several_image_sizes_and_evaluation() -> None:
    model = of(Branches([*towers(3), nn.Identity()]))
    check_same(model, {"0": "branches"}, 2, Run(images(2, 2, 5, 4), train=False))
    check_same(model, {"0": "branches"}, 2, Run(images(1, 2, 3, 7)))


def test_branches_are_dealt_so_that_the_most_loaded_worker_has_least() -> None:
    assert deal([8, 1, 7, 2], 2) == [0, 0, 1, 1]
    assert deal([5, 5], 3) == [0, 1]
    assert sorted(deal([0, 0, 0, 0], 2)) == [0, 0, 1, 1]
    costs = [9, 7, 6, 5, 5, 4]
    owners = deal(costs, 3)
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == worker) for worker in range(3)]
    assert max(loads) <= 4 / 3 * sum(costs) / 3  # Graham's bound for longest first


# -- what is not a block of branches ---------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "chain":
            return self.b(self.a(x))
        if self.kind == "shared":
            y = self.a(x)
            return torch.cat([y, self.b(y)], 1)
        if self.kind == "twice":
            return torch.cat([self.a(x), self.a(x)], 1)
        if self.kind == "own":
            return self.a(x) + self.b(x) * self.scale
        if x.sum() > 0:
            return self.a(x)
        return torch.cat([self.a(x), self.b(x)], 1)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("chain", "no concatenation or sum of branches was found"),
        ("shared", "branches 0 and 1 both use 'a'"),
        ("twice", "some of its branches share parameters"),
        ("own", "parameters or buffers of its own"),
        ("branching", "its forward cannot be followed"),
    ],
)
def test_a_block_that_is_no_set_of_independent_branches_is_refused(kind: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        train_split(of(Block(kind)), {"0": "branches"}, 2, Run(images(1, 2, 3, 3), num_steps=1))
