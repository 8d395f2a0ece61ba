"""Convolutions split by channels are the whole convolution; what is sent is what the formulas say."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.platform.errors import ConfigError
from orchestray.trainers.parallel.tensor.convolution import plan_channels
from support.split_training import Run, check_same, train_split

FLOAT_BYTES = 8


def images(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def of(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*layers).double()


CONVOLUTIONS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "1d": lambda: (nn.Conv1d(5, 7, 3, stride=2, padding=1), images(3, 5, 9)),
    "2d": lambda: (nn.Conv2d(5, 7, (3, 2), padding=(2, 0), dilation=(2, 1)), images(2, 5, 6, 7)),
    "2d circular": lambda: (nn.Conv2d(4, 5, 3, padding=1, padding_mode="circular", bias=False), images(2, 4, 6, 7)),
    "3d": lambda: (nn.Conv3d(3, 4, 2, padding="same"), images(2, 3, 3, 4, 3)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch copies the input then; the sums are the same
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("style", ["channels_gathered", "channels_in"])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_channel_partitioned_convolution_is_the_whole_convolution(kind: str, style: str, size: int) -> None:
    layer, inputs = CONVOLUTIONS[kind]()
    model = of(nn.Tanh(), layer, nn.Tanh())
    operations: dict[int, list[str]] = {}

    def noting(_: nn.Module, group: Collective) -> None:
        own = operations.setdefault(group.rank, [])
        for name in ("all_reduce", "all_gather"):
            setattr(group, name, partial(noted, own, name, getattr(group, name)))

    def noted(own: list[str], name: str, call: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        own.append(name)
        return call(tensor)

    plain, workers = check_same(model, {"1": style}, size, Run(inputs, num_steps=1, before=noting))
    # By output channels the outputs are gathered and the terms of the input's gradient added up; by input channels the
    # terms of the outputs are added up and the input's gradients gathered.
    expected = ["all_gather", "all_reduce"] if style == "channels_gathered" else ["all_reduce", "all_gather"]
    assert [[name for name in own if name in expected] for own in operations.values()] == [expected] * size
    assert layer.weight.numel() == sum(worker.state["1.weight"].numel() for worker in workers)
    assert max(worker.num_held for worker in workers) < plain.num_held


CHAIN_PLAN = {"0": "channels", "1": "channels", "2": "channels", "4": "channels", "6": "channels_in"}


def chain() -> nn.Sequential:
    return of(
        *(nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.PReLU(6), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.Sigmoid(), nn.Conv2d(6, 3, 1), nn.Tanh()),
    )


@pytest.mark.parametrize("size", [2, 3])
def test_a_pair_of_convolutions_trains_as_the_plain_one_with_one_all_reduce_each_way(size: int) -> None:
    samples, side = 2, 6
    plain, workers = check_same(chain(), CHAIN_PLAN, size, Run(images(samples, 2, side, side), num_steps=3))
    output, inputs = samples * 3 * (side // 2) ** 2, samples * 2 * side * side
    for worker in workers:
        assert worker.bytes_sent == sum(-(-2 * (size - 1) * n * FLOAT_BYTES // size) for n in (output, inputs))
        assert worker.split is not None
        assert not worker.split.partial
        # Batch normalisation holds the parameters and statistics of its worker's channels.
        assert {worker.state[f"1.{name}"].numel() for name in ("weight", "running_var")} == {6 // size}
    assert sum(worker.num_held for worker in workers) == plain.num_held + (size - 1) * 3  # the last bias is whole


def test_a_split_convolution_gathers_split_channels_where_it_needs_them_all() -> None:
    model = of(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 3), nn.Conv2d(4, 3, 1))
    plan = {"0": "channels", "2": "channels", "3": "channels_gathered"}
    check_same(model, plan, 2, Run(images(2, 2, 7, 7)))
    check_same(model, plan, 3, Run(images(2, 2, 7, 7)))


@pytest.mark.parametrize("size", [2, 3])
def test_groups_are_split_on_their_borders_without_anything_sent(size: int) -> None:
    model = of(nn.Conv2d(6, 12, 1), nn.GroupNorm(6, 12), nn.Conv2d(12, 6, 3, groups=6), nn.Conv2d(6, 2, 1))
    plan = {"0": "channels", "1": "channels", "2": "channels", "3": "channels_in"}
    check_same(model, plan, size, Run(images(2, 6, 5, 5)))
    check_same(model, {"2": "channels_gathered"}, size, Run(images(2, 6, 5, 5)))


def test_one_slope_for_all_channels_gets_every_workers_part_of_its_gradient() -> None:
    model = of(nn.Conv1d(2, 5, 3), nn.PReLU(), nn.InstanceNorm1d(5, affine=True), nn.Conv1d(5, 3, 2))
    plan = {"0": "channels", "1": "channels", "2": "channels", "3": "channels_in"}
    _, workers = check_same(model, plan, 3, Run(images(3, 2, 9)))
    assert workers[0].split is not None
    assert workers[0].split.partial == {"1.weight"}


def test_images_without_a_batch_are_split_too() -> None:
    check_same(
        of(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 2, 1)), {"0": "channels", "1": "channels_in"}, 2, Run(images(4, 6, 6))
    )


def test_the_plan_of_a_model_pairs_convolutions_and_trains_as_the_plain_one() -> None:
    blocks = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Dropout(0.4), nn.Conv2d(4, 6, 1), nn.ReLU())
    model = of(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), blocks, nn.AvgPool2d(2), nn.Conv2d(6, 5, 1), nn.Tanh()),
        *(nn.Flatten(), nn.Linear(45, 3)),
    )
    plan = plan_channels(model, 2)
    assert plan == {
        "0": "channels",
        "1": "channels",
        "3.0": "channels",
        "3.1": "dropout",
        "3.2": "channels_in",
        "5": "channels_gathered",
    }
    check_same(model, plan, 2, Run(images(2, 1, 8, 8)))
    assert plan_channels(of(nn.Conv2d(1, 1, 3), nn.Conv2d(1, 3, 1)), 2) == {"1": "channels_gathered"}
    for dropout in (nn.AlphaDropout(0.1), nn.FeatureAlphaDropout(0.1)):
        of_alpha = of(nn.Conv2d(1, 4, 3), nn.SELU(), dropout, nn.Conv2d(4, 2, 1))
        assert plan_channels(of_alpha, 2) == {"0": "channels_gathered", "3": "channels_gathered"}


def refused(layer: nn.Module, style: str, size: int = 2, channels: int = 4) -> str:
    with pytest.raises(ConfigError) as caught:
        train_split(of(layer), {"0": style}, size, Run(images(1, channels, 6, 6), num_steps=1))
    return str(caught.value)


@pytest.mark.parametrize(
    ("layer", "style", "size", "said"),
    [
        (lambda: nn.Conv2d(4, 2, 1), "channels", 3, "has 2 output channels, too few for a tensor degree of 3"),
        (lambda: nn.Conv2d(4, 8, 1), "channels_in", 5, "has 4 input channels, too few"),
        (lambda: nn.Conv2d(4, 8, 1, groups=4), "channels", 3, "would cut through"),
        (lambda: nn.Conv2d(4, 8, 1, groups=2), "channels_in", 2, "no output sees all input channels"),
        (lambda: nn.ConvTranspose2d(4, 8, 1), "channels", 2, "it is a ConvTranspose2d"),
        (lambda: nn.GroupNorm(2, 6), "channels", 3, "would cut through"),
    ],
)
def test_what_cannot_be_split_is_refused_with_what_would_fit(layer: Any, style: str, size: int, said: str) -> None:
    assert said in refused(layer(), style, size)


def test_channels_that_are_neither_whole_nor_split_as_expected_are_refused() -> None:
    model = of(nn.Conv2d(4, 6, 1), nn.Conv2d(6, 6, 1), nn.ChannelShuffle(3), nn.Conv2d(12, 3, 1))
    model[2] = nn.Identity()
    with pytest.raises(ConfigError, match="got 3 channels, neither all 12 nor this worker's 6"):
        train_split(model, {"0": "channels", "1": "channels", "3": "channels_in"}, 2, Run(images(1, 4, 3, 3)))
