"""An optimizer that averages what it updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from orchestray.platform.errors import CheckpointError
from orchestray.trainers.optim.averaged import Averaged
from orchestray.trainers.optim.factory import make_optimizer

GROUPS = [{"match": "*.bias", "momentum": 0.0}]


def made(groups: list[dict[str, Any]] | None = None, **average: Any) -> tuple[Averaged, nn.Linear]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = Averaged(make_optimizer("sgd", lr=0.1, momentum=0.9, groups=groups or []), **average)
    optimizer.init([(f"layer.{name}", parameter) for name, parameter in model.named_parameters()])
    optimizer.begin(steps_per_epoch=4)
    return optimizer, model


def step(optimizer: Averaged, model: nn.Module, number: int) -> None:
    gradients: list[Tensor | None] = [torch.full_like(parameter, number / 10) for parameter in model.parameters()]
    optimizer.step(list(model.parameters()), gradients, 0.1)
    optimizer.add(number)


@pytest.mark.parametrize(
    ("average", "steps"),
    [
        ({"type": "ema", "decay": 0.9}, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ({"type": "ema", "decay": 0.9, "every_steps": 3, "from_step": 2}, [5, 8]),
        ({"type": "swa", "every_steps": None}, [4, 8]),
        ({"type": "swa", "every_steps": 2, "from_epoch": 1}, [6, 8]),
    ],
)
def test_the_average_has_the_bits_of_torch_over_the_steps_that_count(average: dict[str, Any], steps: list[int]) -> None:
    optimizer, model = made(**average)
    add: Any = get_ema_multi_avg_fn(0.9) if average["type"] == "ema" else get_swa_multi_avg_fn()
    expected = AveragedModel(model, multi_avg_fn=add)
    for number in range(1, 10):
        step(optimizer, model, number)
        if number in steps:
            expected.update_parameters(model)
        assert optimizer.has_begun(number) is (number >= steps[0])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.swap()
    assert all(map(torch.equal, model.parameters(), expected.module.parameters()))
    optimizer.swap()
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("groups", [[], GROUPS], ids=["one group", "groups"])
def test_an_average_that_is_loaded_goes_on_bit_for_bit(groups: list[dict[str, Any]]) -> None:
    optimizer, model = made(groups, type="ema", decay=0.9)
    other, restored = made(groups, type="ema", decay=0.9)
    for number in (1, 2, 3):
        step(optimizer, model, number)
    restored.load_state_dict(model.state_dict())
    other.load_state_tensors({name: tensor.clone() for name, tensor in optimizer.state_tensors().items()})
    assert {"layer.weight.average", "layer.weight.momentum_buffer"} <= set(other.state_tensors())
    for number in (4, 5):
        step(optimizer, model, number)
        step(other, restored, number)
    left, right = optimizer.state_tensors(), other.state_tensors()
    assert left.keys() == right.keys()
    assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def test_a_saved_average_that_does_not_fit_is_refused() -> None:
    optimizer, model = made(type="ema", decay=0.9)
    step(optimizer, model, 1)
    saved = optimizer.state_tensors()
    with pytest.raises(CheckpointError, match=r"lacks layer\.bias\.average"):
        optimizer.load_state_tensors({key: value for key, value in saved.items() if key != "layer.bias.average"})
    with pytest.raises(CheckpointError, match=r"'layer\.bias\.average' of shape \[5\]; this model needs \[2\]"):
        optimizer.load_state_tensors({**saved, "layer.bias.average": torch.zeros(5)})
    optimizer.load_state_tensors({key: value for key, value in saved.items() if not key.endswith("average")})
    with pytest.raises(CheckpointError, match="has no average of the weights"):
        step(optimizer, model, 2)
