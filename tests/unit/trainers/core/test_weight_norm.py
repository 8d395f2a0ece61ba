"""Weights as a length times a direction: those of torch, and folded into plain ones again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from orchestray.platform.errors import ConfigError
from orchestray.trainers.core.model_state import StateKeeper
from orchestray.trainers.core.weight_norm import folded, folded_for, normalise_weights


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 6, 3), nn.Tanh(), nn.ConvTranspose2d(6, 1, 2), nn.Flatten(), nn.Linear(49, 5)]
    return nn.Sequential(*layers).double()


def inputs() -> Tensor:
    return torch.randn(4, 2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def move(model: nn.Module) -> None:
    """Make a step of gradient descent."""
    model(inputs()).square().sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= 1e-3 * parameter.grad


def test_it_is_torch_s_weight_norm_in_outputs_and_steps() -> None:
    plain, ours, torchs = network(), network(), network()
    normalise_weights(ours)
    for place, out in ((0, 0), (2, 1), (4, 0)):  # the outputs of a transposed convolution are its second dimension
        weight_norm(torchs[place], dim=out)
    torch.testing.assert_close(ours(inputs()), plain(inputs()), rtol=1e-12, atol=1e-12)
    for model in (ours, torchs):
        move(model)
    assert all(torch.equal(one, two) for one, two in zip(ours.parameters(), torchs.parameters(), strict=True))
    for place, out in ((0, 0), (2, 1), (4, 0)):  # w = g v / |v| for each output, after the step as well
        length, direction = (getattr(ours[place].parametrizations.weight, f"original{number}") for number in (0, 1))
        rows = direction.transpose(0, out).flatten(1)
        wanted = length.transpose(0, out).flatten(1) * rows / rows.square().sum(1, keepdim=True).sqrt()
        torch.testing.assert_close(ours[place].weight.transpose(0, out).flatten(1), wanted, rtol=1e-12, atol=1e-12)


def test_the_gradient_of_a_direction_leaves_its_length_as_it_is() -> None:
    model = network()
    normalise_weights(model)
    direction = model[4].parametrizations.weight.original1
    (of_direction,) = torch.autograd.grad(model(inputs()).square().sum(), direction)
    torch.testing.assert_close((of_direction * direction).sum(1), torch.zeros(5).double(), atol=1e-9, rtol=0)


def test_folded_weights_are_those_of_a_plain_model_that_computes_the_same() -> None:
    model = network()
    normalise_weights(model)
    move(model)
    state = StateKeeper(model).state()
    plain = network()
    plain.load_state_dict(dict(folded(state).tensors))
    torch.testing.assert_close(plain(inputs()), model(inputs()), rtol=1e-12, atol=1e-12)
    assert folded_for(plain, state).tensors.keys() == plain.state_dict().keys()
    assert folded_for(model, state).tensors.keys() == state.tensors.keys()  # one with lengths of its own takes them
    assert StateKeeper(model).is_plain  # so it trains under every layout


def test_tied_and_frozen_weights_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[1].weight = model[0].weight  # type: ignore[assignment]
    model[2].requires_grad_(False)
    normalise_weights(model)
    assert [hasattr(layer, "parametrizations") for layer in model] == [False, False, False, True]


def test_what_has_no_direction_or_one_of_its_own_is_refused_by_its_name() -> None:
    model = network()
    with torch.no_grad():
        model[4].weight[2] = 0
    with pytest.raises(ConfigError, match=r"the layer '4' begins with an output whose weights are all 0"):
        normalise_weights(model)
    model = network()
    weight_norm(model[0])
    with pytest.raises(ConfigError, match="the layer '0' has a parametrization of its own"):
        normalise_weights(model)
    with pytest.raises(ConfigError, match="has no fully connected or convolutional layer"):
        normalise_weights(nn.Sequential(nn.Embedding(3, 3)))
