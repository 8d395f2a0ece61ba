"""The layers of many members at once are what each member's model computes alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import stack_module_state

from orchestray.search.trials.batched_layers import StackedModel

MEMBERS = 3


class Branches(nn.Module):
    """A module that is made of a plain sequence, but is not one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Sequential(nn.Linear(6, 4), nn.ReLU()), nn.Linear(6, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.left(inputs) * self.right(inputs).mean(0)
        return outputs


def tied() -> nn.Module:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second)


def twice_the_same() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.ReLU(), layer)


def hooked() -> nn.Module:
    layer = nn.Linear(6, 4)
    layer.register_forward_hook(lambda _layer, _inputs, outputs: 2 * outputs)
    return nn.Sequential(layer, nn.ReLU())


MODELS = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), (7, 6)),
    "three layers": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2), nn.ReLU()),
        (7, 6),
    ),
    "ReLUs after each other": (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.ReLU(), nn.Linear(5, 2)), (7, 6)),
    "sequences in sequences": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 5, bias=False), nn.GELU()), nn.LayerNorm(5), nn.Linear(5, 2)),
        (7, 6),
    ),
    "begins without weights": (lambda: nn.Sequential(nn.Flatten(), nn.Tanh(), nn.Linear(6, 2)), (7, 2, 3)),
    "rows within a sample": (lambda: nn.Sequential(nn.Linear(6, 5), nn.SiLU(), nn.Linear(5, 2)), (7, 4, 6)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)),
        (7, 1, 4, 4),
    ),
    "one layer": (lambda: nn.Linear(6, 2), (7, 6)),
    "a user's module": (Branches, (7, 6)),
    "tied weights": (tied, (7, 6)),
    "a layer twice": (twice_the_same, (7, 6)),
    "a layer with a hook": (hooked, (7, 6)),
}


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_of_members_are_those_of_their_models(name: str) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    models = [make().double() for _ in range(MEMBERS)]
    inputs = torch.randn(shape, dtype=torch.float64)
    parameters, buffers = stack_module_state(models)
    outputs = StackedModel(models[0]).outputs({**parameters, **buffers}, inputs, MEMBERS)
    weighed = torch.randn_like(outputs)
    gradients = torch.autograd.grad((outputs * weighed).sum(), list(parameters.values()))
    for member, model in enumerate(models):
        own = dict(model.named_parameters())
        alone = model(inputs)
        torch.testing.assert_close(outputs[member], alone, rtol=1e-12, atol=1e-12)
        expected = torch.autograd.grad((alone * weighed[member]).sum(), list(own.values()))
        for gradient, wanted in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient[member], wanted, rtol=1e-10, atol=1e-12)


def test_dropout_drops_the_same_of_every_member_and_leaves_a_model_in_evaluation_whole() -> None:
    model = nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Identity())
    parameters, buffers = stack_module_state([model] * MEMBERS)
    stacked = StackedModel(model)
    dropped = stacked.outputs({**parameters, **buffers}, torch.ones(7, 6), MEMBERS)
    assert bool((dropped[0] == 0).any())
    assert all(torch.equal(dropped[0], member) for member in dropped)
    model.eval()
    assert not bool((stacked.outputs({**parameters, **buffers}, torch.ones(7, 6), MEMBERS) == 0).any())
