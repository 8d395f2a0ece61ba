"""Layers frozen by patterns of names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from orchestray.platform.errors import ConfigError
from orchestray.trainers.core.frozen_layers import freeze_layers


def network() -> nn.Module:
    features = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    return nn.ModuleDict({"features": features, "head": nn.Linear(4, 2)})


def test_what_fits_a_pattern_has_no_gradient_and_a_module_without_others_is_in_evaluation_mode() -> None:
    model = network()
    freeze_layers(model, ["features.*", "head.bias"])
    assert [name for name, each in model.named_parameters() if each.requires_grad] == ["head.weight"]
    modes = {name: module.training for name, module in model.named_modules()}
    assert modes == {
        "": True,
        "features": False,
        "features.0": False,
        "features.1": False,
        "features.2": False,
        "head": True,
    }


def test_a_tied_parameter_is_frozen_by_either_of_its_names() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4))
    model[1].weight = model[0].weight  # type: ignore[assignment]
    freeze_layers(model, ["1.weight"])
    assert not model[0].weight.requires_grad
    assert torch.is_tensor(model[1].bias)
    assert model[1].bias.requires_grad


def test_a_pattern_that_fits_nothing_and_one_that_leaves_nothing_to_train_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no parameter has a name like 'body\.\*'; there are features\.0\.weight"):
        freeze_layers(network(), ["body.*"])
    with pytest.raises(ConfigError, match=r"'\*' freeze every parameter of the model"):
        freeze_layers(network(), ["*"])
