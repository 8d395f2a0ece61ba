"""Factors of fully connected layers that workers send and servers multiply."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.trainers.ps.protocol.encoding import GradientDecoder, GradientEncoder
from orchestray.trainers.ps.protocol.factors import FactorCapture, capture_of
from orchestray.trainers.ps.protocol.partition import FlatModel, Partition
from orchestray.trainers.ps.protocol.requests import FACTORS
from orchestray.trainers.ps.protocol.settings import Factors

ROWS = 3


class Convolutional(nn.Module):
    """A network of a convolution, three layers that are called, and one whose weight is used without it."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, 4, 3)
        self.first, self.second = nn.Linear(72, 24), nn.Linear(24, 20, bias=False)
        self.aside, self.last = nn.Linear(20, 20), nn.Linear(20, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolution(x[:, None]).relu().flatten(1)
        x = self.second(input=self.first(x).tanh()).tanh()
        x = functional.linear(x, self.aside.weight, self.aside.bias).tanh()
        y: Tensor = self.last(x)
        return y


def computed(factors: Factors, rows: int = ROWS) -> tuple[nn.Module, FlatModel, FactorCapture]:
    """Return a model after the backward passes of a share in two parts, and what was captured of them."""
    torch.manual_seed(0)
    model = Convolutional().double()
    flat, capture = FlatModel(model), capture_of(model, factors)
    assert capture is not None
    for _ in range(2):  # what an earlier share has left is forgotten
        flat.begin()
        capture.begin()
        for part in torch.randn(rows, 20, dtype=torch.float64).tensor_split(2):
            model(part).square().sum().backward()
    return model, flat, capture


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7])
@pytest.mark.parametrize("factors", ["auto", "always"])
def test_the_gradient_that_servers_make_of_factors_is_the_direct_one_wherever_they_cut(
    num_shards: int, factors: Factors
) -> None:
    model, flat, capture = computed(factors)
    gradient = capture.gradient(flat.gradients)
    assert gradient is not None
    partition = Partition.of(model, num_shards)
    encoder = GradientEncoder(partition, flat.values, None)
    made = []
    for shard, part in enumerate(partition.cut(flat.values)):
        encoding, tensors = encoder.encode(shard, gradient, 1)
        assert encoding == FACTORS
        decoded, buffers = GradientDecoder(partition.slices(shard), part).decode(encoding, tensors)
        assert buffers is None
        made.append(decoded)
    assert (torch.cat(made) - flat.gradient).abs().max() < 1e-12
    assert flat.gradient.abs().max() > 0.1


def test_convolutions_send_gradients_and_layers_whose_factors_are_less_send_these_alone() -> None:
    model, flat, capture = computed("auto")
    gradient = capture.gradient(flat.gradients)
    assert gradient is not None
    assert capture.ways() == {"first": "factors", "second": "factors", "aside": "gradient", "last": "gradient"}
    assert gradient.factors.numel() == ROWS * (72 + 24) + ROWS * (24 + 20)
    whole = [each.grad for name, each in model.named_parameters() if name not in ("first.weight", "second.weight")]
    assert torch.equal(gradient.rest.values, torch.cat([each.flatten() for each in whole if each is not None]))


def test_the_choice_switches_where_factors_become_more_values_than_the_gradient() -> None:
    switch = 72 * 24 // (72 + 24)  # 18 rows
    for rows, way in ((switch - 1, "factors"), (switch, "gradient")):
        _, flat, capture = computed("auto", rows)
        capture.gradient(flat.gradients)
        assert capture.ways()["first"] == way


def test_without_a_layer_that_sends_factors_there_is_no_such_gradient_and_never_captures_nothing() -> None:
    _, flat, capture = computed("auto", rows=400)
    assert capture.gradient(flat.gradients) is None
    assert capture_of(Convolutional(), "never") is None


def test_a_layer_without_samples_and_one_after_the_hooks_are_gone_send_their_gradient() -> None:
    model, flat, capture = computed("always")
    capture.detach()
    flat.begin()
    capture.begin()
    model(torch.ones(2, 20, dtype=torch.float64)).sum().backward()
    assert capture.gradient(flat.gradients) is None


def test_a_server_gets_the_errors_of_those_outputs_alone_of_which_it_holds_elements() -> None:
    _, flat, capture = computed("always")
    gradient = capture.gradient(flat.gradients)
    assert gradient is not None
    part = gradient.cut(10, 100)  # a part of two rows of the first layer's weight, which begins at 16
    assert part.layers.tolist() == [[ROWS, 72, 2, 16 - 10]]
    assert part.factors.numel() == ROWS * (72 + 2)
    assert part.num_bytes == sum(each.nbytes for each in part.tensors)
    assert (part.fill(torch.empty(90, dtype=torch.float64)) - flat.gradient[10:100]).abs().max() < 1e-12
