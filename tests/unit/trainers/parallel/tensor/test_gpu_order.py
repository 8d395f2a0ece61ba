"""Layers that are split over workers, under NCCL's rules: no order of events makes them wait, or changes a bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.trainers.parallel.tensor.branches import Branches
from support.nccl import run_on_gpus
from support.split_training import CLOSE, Run, Trained, train_plain, train_split


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 5, padding=2), nn.Tanh())


def branches(merge: Any) -> nn.Module:
    return nn.Sequential(Branches([nn.Conv2d(2, 2, 3, padding=1) for _ in range(2)], merge), nn.Tanh())


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))


SPLIT: dict[str, tuple[Callable[[], nn.Module], dict[str, str], Tensor]] = {
    "rows of images, whose halos travel beside the interior": (convolutions, {"": "height"}, drawn(2, 2, 15, 4)),
    "columns of images": (convolutions, {"": "width"}, drawn(2, 2, 4, 15)),
    "branches that are joined, fewer than workers": (
        lambda: branches("concat"),
        {"0": "branches"},
        drawn(2, 2, 5, 4),
    ),
    "branches that are added": (lambda: branches("sum"), {"0": "branches"}, drawn(2, 2, 5, 4)),
    "columns and rows of layers": (layers, {"0": "output", "2": "input"}, drawn(4, 6)),
}


@pytest.mark.parametrize("num_seeds", [4, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SPLIT)
def test_a_split_layer_trains_to_the_same_bits_in_any_order_and_never_stands_still(name: str, num_seeds: int) -> None:
    make, plan, inputs = SPLIT[name]
    torch.manual_seed(0)
    model = make().double()
    plain = train_plain(model, Run(inputs))
    first: list[Trained] = []
    for seed in range(num_seeds):

        def meet(size: int, worker: Callable[[Collective], Trained], seed: int = seed) -> list[Trained]:
            found, gpus = run_on_gpus(size, worker, seed=seed, room=(None, 1)[seed % 2])
            assert not [known for known in gpus.communicators if " " in known], "no communicator of a pair"
            return found

        found = train_split(model, plan, 3, Run(inputs), meet)
        first = first or found
        for here, before in zip(found, first, strict=True):
            assert torch.equal(here.outputs, before.outputs), seed
            assert torch.allclose(here.outputs, plain.outputs, rtol=CLOSE, atol=CLOSE)
            assert all(torch.equal(each, before.state[key]) for key, each in here.state.items()), seed
