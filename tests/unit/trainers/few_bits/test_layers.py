"""The layers that are chosen, and what a model looks like with them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.errors import ConfigError
from orchestray.trainers.few_bits.layers import quantize_layers, renamed
from support.few_bits import quantize_section


class Mixed(nn.Module):
    """Layers of all kinds, of which attention has a linear layer that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Flatten())
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.body(self.norm(self.stem(x))).reshape(len(x), -1, 8)
        seen, _ = self.attention(rows, rows, rows)
        found: Tensor = self.head(self.middle(input=seen.mean(1)))
        return found


def quantized_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if hasattr(module, "parametrizations")]


@pytest.mark.parametrize(
    ("ends", "names"),
    [("quantized", ["stem", "body.0", "middle", "head"]), ("float", ["body.0", "middle"])],
)
@pytest.mark.parametrize("kind", ["bnn", "twn", "dorefa", "flexpoint"])
def test_linear_and_convolutional_layers_are_quantized_with_or_without_the_ends(
    kind: str, ends: str, names: list[str]
) -> None:
    torch.manual_seed(0)
    model = quantize_layers(Mixed(), quantize_section(kind, ends=ends))
    assert quantized_names(model) == names
    model(torch.rand(2, 1, 4, 4)).sum().backward()
    trained = dict(model.named_parameters())
    for name in names:
        assert trained[f"{name}.parametrizations.weight.original"].grad is not None


@pytest.mark.parametrize("kind", ["bnn", "twn", "dorefa", "flexpoint"])
def test_a_quantized_model_is_built_without_memory_and_copied(kind: str) -> None:
    with torch.device("meta"):
        bare = quantize_layers(Mixed(), quantize_section(kind))
    torch.manual_seed(0)
    model = quantize_layers(Mixed(), quantize_section(kind)).eval()
    assert bare.state_dict().keys() == model.state_dict().keys()
    x = torch.rand(2, 1, 4, 4)
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_whoever_reads_a_weight_gets_the_quantized_one_in_evaluation_as_well() -> None:
    model: Any = quantize_layers(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), quantize_section("bnn")).eval()
    assert set(model[1].weight.unique().tolist()) == {-1.0, 1.0}
    original = model[1].parametrizations.weight.original
    assert isinstance(original, nn.Parameter)
    assert len(original.unique()) == 8


def test_names_of_a_model_of_floating_point_numbers_are_found_in_its_quantized_form() -> None:
    plain = Mixed()
    model = quantize_layers(copy.deepcopy(plain), quantize_section("twn", ends="float"))
    given = renamed(model, plain.state_dict())
    assert given.keys() == model.state_dict().keys()
    assert renamed(model, given).keys() == given.keys()
    single = quantize_layers(nn.Linear(2, 2), quantize_section("twn"))
    assert renamed(single, nn.Linear(2, 2).state_dict()).keys() == single.state_dict().keys()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "no layer to quantize besides its first and last one"),
        (nn.Sequential(nn.Embedding(4, 2)), r"no layer to quantize \(Linear, Conv1d, Conv2d, Conv3d\)"),
    ],
)
def test_a_model_without_such_layers_is_refused(model: nn.Module, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        quantize_layers(model, quantize_section("dorefa"))


def test_binarization_puts_hard_tanh_in_place_of_relu_behind_which_all_signs_would_be_one() -> None:
    nested = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    model: Any = quantize_layers(copy.deepcopy(nested), quantize_section("bnn"))
    assert isinstance(model[1], nn.Hardtanh)
    assert isinstance(model[2][0], nn.Hardtanh)
    other: Any = quantize_layers(copy.deepcopy(nested), quantize_section("twn"))
    assert isinstance(other[1], nn.ReLU)
