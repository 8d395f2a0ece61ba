"""Weights drawn by torch's distributions: their variance, what is drawn, and signals through deep networks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.errors import ConfigError
from orchestray.trainers.core.drawn_weights import DISTRIBUTIONS, draw_weights
from orchestray.trainers.few_bits.layers import quantize_layers
from support.few_bits import quantize_section


def is_within_three_sigma(values: Tensor, variance: float, kurtosis: float) -> bool:
    """Return True if the sample variance is what it should be; kurtosis: the fourth moment over variance squared."""
    sigma = variance * ((kurtosis - 1) / values.numel()) ** 0.5
    return abs(float(values.double().square().mean()) - variance) <= 3 * sigma


@pytest.mark.parametrize(("distribution", "kurtosis"), [("xavier_uniform", 1.8), ("xavier_normal", 3.0)])
@pytest.mark.parametrize(
    "layer", [nn.Linear(300, 150), nn.Conv2d(24, 48, 5), nn.LSTM(96, 64), nn.GRUCell(64, 96), nn.Linear(64, 400)]
)
def test_xavier_s_variance_is_two_over_the_fans(layer: nn.Module, distribution: str, kurtosis: float) -> None:
    torch.manual_seed(0)
    draw_weights(layer, distribution)
    for name, parameter in layer.named_parameters():
        if "bias" in name:
            assert not parameter.any()
            continue
        hidden = getattr(layer, "hidden_size", None)
        for gate in parameter.split(hidden) if hidden else (parameter,):
            fans = (gate.shape[0] + gate.shape[1]) * gate[0, 0].numel()
            assert is_within_three_sigma(gate.detach(), 2 / fans, kurtosis)


def signals(distribution: str | None, depth: int = 40, width: int = 128) -> tuple[list[float], list[float]]:
    """Return the standard deviations of each layer's signals forward and of its gradients backward, before a tanh.

    The signals stay where the tanh is nearly a straight line, as Glorot and Bengio assume.
    """
    torch.manual_seed(0)
    layers = [nn.Linear(width, width) for _ in range(depth)]
    network = nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))
    if distribution is not None:
        draw_weights(network, distribution)
    now = 0.01 * torch.randn(256, width)
    sums = []
    for layer in layers:
        total = layer(now)
        total.retain_grad()
        sums.append(total)
        now = torch.tanh(total)
    (now * torch.randn_like(now)).sum().backward()  # type: ignore[no-untyped-call]
    return [float(each.std()) for each in sums], [float(each.grad.std()) for each in sums if each.grad is not None]


@pytest.mark.parametrize("distribution", ["xavier_uniform", "xavier_normal", "orthogonal"])
def test_signals_and_gradients_keep_their_size_through_forty_layers_of_tanh(distribution: str) -> None:
    for found in signals(distribution):
        assert 0.5 < found[-1] / found[0] < 2
        assert all(0.8 < after / before < 1.25 for before, after in pairwise(found))


def test_with_torch_s_own_weights_they_do_not() -> None:
    _, backward = signals(None)
    assert backward[0] < 1e-6 * backward[-1]


def test_kaiming_has_twice_the_variance_over_fan_in_and_a_gain_is_a_factor() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(200, 300)
    draw_weights(layer, "kaiming_normal", gain=3.0)
    assert is_within_three_sigma(layer.weight.detach() / 3, 2 / 200, 3.0)


def test_a_weight_that_is_tied_or_frozen_and_what_is_no_layer_stay_as_they_should() -> None:
    model = nn.ModuleDict(
        {"table": nn.Embedding(9, 4), "norm": nn.LayerNorm(4), "up": nn.Linear(4, 9), "frozen": nn.Linear(4, 4)}
    )
    model["frozen"].requires_grad_(False)
    with torch.no_grad():
        model["norm"].bias.fill_(2.0)  # type: ignore[operator,union-attr]
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    draw_weights(model, "xavier_uniform")
    after = dict(model.named_parameters())
    changed = {name for name, each in before.items() if not torch.equal(each, after[name])}
    assert changed == {"up.weight", "up.bias"}
    other = nn.Linear(4, 9)
    other.weight = model["up"].weight  # type: ignore[assignment]
    torch.manual_seed(0)
    draw_weights(nn.ModuleList([model["up"], other]), "xavier_uniform")
    twice = model["up"].weight.detach().clone()  # type: ignore[operator,union-attr]
    torch.manual_seed(0)
    draw_weights(other, "xavier_uniform")
    assert torch.equal(other.weight, twice)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_model_without_layers_is_refused(distribution: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.init: the model has no layer whose weights could be drawn"):
        draw_weights(nn.Sequential(nn.Embedding(3, 2), nn.LayerNorm(2)), distribution)


@pytest.mark.parametrize("ends", ["float", "quantized"])
def test_the_real_weights_of_quantized_layers_are_drawn_like_those_of_others(ends: str) -> None:
    drawn = []
    for is_quantized in (False, True):
        model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))
        if is_quantized:
            quantize_layers(model, quantize_section("twn", ends=ends))
        torch.manual_seed(0)
        draw_weights(model, "xavier_uniform")
        drawn.append(sorted(model.named_parameters(), key=lambda named: named[0].replace("parametrizations.", "")))
    for (_, plain), (_, real) in zip(*drawn, strict=True):
        assert torch.equal(plain, real)
