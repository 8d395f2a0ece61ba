"""Memory that one process shares is never cut apart; where it is not shared, cuts stay free."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.platform.errors import ConfigError
from orchestray.trainers.parallel.pipeline.balance import balanced
from orchestray.trainers.parallel.pipeline.cutting import layers_of
from support.cut_models import MODELS, Shared, build, run_chain, run_plain, vectors

NO_TASK: Any = SimpleNamespace()


class Four(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))


class ChangedView(Four):
    """A model in which the change of `row` is seen in `x`."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        row = x[:, :3]
        y = self.b(x.detach().clone())
        row.mul_(2)
        y = self.c(y)
        return self.d(x + y)


class AddedTo(Four):
    """A model in which the sum is seen in `kept`."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        kept = x.view_as(x)
        y = self.b(x.detach().clone())
        x += y
        y = self.c(y)
        return self.d(kept + y)


class Rectified(Four):
    """A model that uses the input of a rectifier in place after it, through another name."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.relu = nn.Flatten(), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        flat = self.flat(x)
        y = self.c(self.b(flat.detach().clone()))
        self.relu(flat)
        return self.d(x + y)


class Unshared(Four):
    """A model that changes, in place, only what nothing else uses later."""

    def forward(self, x: Tensor) -> Tensor:
        skip = x = self.a(x)
        x = self.b(x)
        x += skip
        x = functional.relu(x, inplace=True)
        x = self.c(x).clamp_(-1)
        return self.d(x.view(-1, 6).mul_(2)) + skip


def agrees(model: nn.Module, cut: int) -> bool:
    """Return True if two stages compute what the model does, forward and backward; unchecked."""
    plain = copy.deepcopy(model)
    layers = layers_of(NO_TASK, model)
    inputs = vectors()
    same = torch.equal(
        run_chain([layers.part(0, cut), layers.part(cut, len(layers))], inputs), run_plain(plain, inputs)
    )
    gradients = zip(model.parameters(), plain.parameters(), strict=True)
    return same and all(torch.equal(a.grad, b.grad) for a, b in gradients if a.grad is not None and b.grad is not None)


@pytest.mark.parametrize(("kind", "forbidden"), [(ChangedView, {1}), (AddedTo, {1}), (Rectified, {2, 3, 4})])
def test_a_cut_that_would_part_a_change_from_what_sees_it_is_forbidden(
    kind: type[nn.Module], forbidden: set[int]
) -> None:
    torch.manual_seed(0)
    model = kind().double()
    layers = layers_of(NO_TASK, model)
    assert set(layers.forbidden_cuts) == forbidden
    assert not all(agrees(copy.deepcopy(model), cut) for cut in forbidden)
    for cut in range(1, len(layers)):
        assert cut in forbidden or agrees(copy.deepcopy(model), cut)
        if cut in forbidden:
            with pytest.raises(
                ConfigError, match=r"changed in place at .*test_cuts\.py, line .* is used under another"
            ):
                layers.stage(0, cut)


@pytest.mark.parametrize("name", MODELS)
def test_models_that_share_no_memory_can_be_cut_anywhere(name: str) -> None:
    assert layers_of(NO_TASK, build(name), at_least=8).forbidden_cuts == {}


def test_changes_in_place_that_nothing_else_sees_do_not_forbid_a_cut() -> None:
    torch.manual_seed(0)
    model = Unshared().double()
    layers = layers_of(NO_TASK, model)
    assert layers.forbidden_cuts == {}
    assert all(agrees(copy.deepcopy(model), cut) for cut in range(1, len(layers)))


def test_a_balanced_cut_keeps_what_is_forbidden() -> None:
    layers = layers_of(NO_TASK, Shared(norm=True))
    assert layers.names == ["shared.0", "shared.1", "shared.0@2", "shared.1@2", "own", "shared.0@3", "shared.1@3"]
    assert set(layers.forbidden_cuts) == {2, 3, 4, 5, 6}
    assert balanced([1] * 7, 2, forbidden=layers.forbidden_cuts) == [(0, 1), (1, 7)]
    with pytest.raises(ConfigError, match="the model has 2 layers that a pipeline can cut between, too few for 3"):
        balanced([1] * 7, 3, forbidden=layers.forbidden_cuts)
