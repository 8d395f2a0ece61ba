"""Weights that a run starts with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from orchestray.platform.errors import ConfigError
from orchestray.platform.run.model_files import save_model
from orchestray.trainers.core.initial_model import InitialModel
from orchestray.trainers.core.model_state import StateKeeper
from orchestray.trainers.core.weight_norm import normalise_weights
from orchestray.trainers.core.weights import convert
from orchestray.trainers.saved.initial_weights import with_initial_weights
from orchestray.trainers.saved.trained_model import write_model
from support.few_bits import quantized_digits
from support.training import digits


def start(place: Path, *, precision: str = "float32", **others: Any) -> InitialModel:
    return InitialModel(precision, init_from=str(place), **others)


@pytest.mark.parametrize("form", ["run", "folder", "safetensors", "torch"])
def test_weights_come_from_a_run_a_folder_or_a_file(tmp_path: Path, form: str) -> None:
    model = digits().build_model()
    save_model(tmp_path / "run" / "model", model.state_dict(), {})
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    folder = tmp_path / "run" / "model"
    places = {"run": folder.parent, "folder": folder, "safetensors": folder / "model.safetensors"}
    place = places.get(form, tmp_path / "weights.pt")
    found = with_initial_weights(digits(), start(place)).build_model().state_dict()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


def test_weights_of_another_model_are_refused_with_what_differs(tmp_path: Path) -> None:
    save_model(tmp_path / "deep", digits(hidden=[8, 8]).build_model().state_dict(), {})
    save_model(tmp_path / "wide", digits(hidden=[64]).build_model().state_dict(), {})
    with pytest.raises(ConfigError, match=r"not of this model: .* not in the model: 4\.bias, 4\.weight"):
        with_initial_weights(digits(), start(tmp_path / "deep")).build_model()
    with pytest.raises(ConfigError, match=r"not of this model: .* of another kind: .* is float32 \[64"):
        with_initial_weights(digits(), start(tmp_path / "wide")).build_model()
    with pytest.raises(ConfigError, match="no weights at"):
        with_initial_weights(digits(), start(tmp_path / "nothing")).build_model()


def test_a_quantized_model_begins_with_the_weights_of_floating_point_numbers(tmp_path: Path) -> None:
    model, task = digits().build_model(), quantized_digits("twn", task=digits)()
    save_model(tmp_path / "run" / "model", model.state_dict(), {})
    found: Any = with_initial_weights(task, start(tmp_path / "run")).build_model()
    assert torch.equal(found[0].parametrizations.weight.original, model.state_dict()["0.weight"])
    assert torch.equal(found[0].bias, model.state_dict()["0.bias"])
    assert len(found[0].weight.unique()) == 3
    save_model(tmp_path / "quantized" / "model", found.state_dict(), {})
    again: Any = with_initial_weights(task, start(tmp_path / "quantized")).build_model()
    assert torch.equal(again[0].weight, found[0].weight)


class Counting(nn.Linear):
    """A layer with extra state and a complex number, which a run keeps in ways of their own."""

    def __init__(self, count: int = 0) -> None:
        super().__init__(2, 1)
        self.count = count
        self.phase = nn.Parameter(torch.randn(2, dtype=torch.complex64))

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@pytest.mark.parametrize("form", ["run", "torch"])
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_all_that_a_model_keeps_comes_from_a_run_without_rounding(tmp_path: Path, form: str, precision: str) -> None:
    model, task = Counting(7), SimpleNamespace(build_model=Counting)
    convert(model, getattr(torch, precision))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 / 3)
    write_model(tmp_path / "run" / "model", StateKeeper(model).state(), {}, task)  # type: ignore[arg-type]
    torch.save(model.state_dict(), tmp_path / "torch")
    found: Any = with_initial_weights(task, start(tmp_path / form, precision=precision)).build_model()  # type: ignore[arg-type]
    assert found.count == 7
    assert all(torch.equal(one, two) for one, two in zip(found.parameters(), model.parameters(), strict=True))


def test_a_head_that_does_not_fit_is_named_and_begins_afresh_where_it_is_left_out(tmp_path: Path) -> None:
    """Save the first layer; the second has another width and the third another input, and the task draws those."""
    save_model(tmp_path / "run", digits(hidden=[32, 8]).build_model().state_dict(), {})
    task = digits(hidden=[32, 16])
    with pytest.raises(ConfigError, match=r"not of this model: .*2\.bias.*name them in train\.init_except"):
        with_initial_weights(task, start(tmp_path / "run")).build_model()
    torch.manual_seed(3)
    fresh = task.build_model().state_dict()
    torch.manual_seed(3)
    chosen = start(tmp_path / "run", init_except=("2.*", "4.weight"))
    found = with_initial_weights(task, chosen).build_model().state_dict()
    saved = digits(hidden=[32, 8]).build_model().state_dict().keys()
    assert found.keys() == saved
    for name, tensor in found.items():
        is_saved = not torch.equal(tensor, fresh[name])
        assert is_saved == (name in {"0.weight", "0.bias", "4.bias"})
    with pytest.raises(ConfigError, match=r"nothing in the model or in .* has a name like 'top\.\*'"):
        with_initial_weights(task, start(tmp_path / "run", init_except=("top.*",))).build_model()


def test_layers_that_the_model_no_longer_has_may_be_left_out(tmp_path: Path) -> None:
    model = digits(hidden=[32, 8]).build_model()
    save_model(tmp_path / "run", model.state_dict(), {})
    found = with_initial_weights(digits(), start(tmp_path / "run", init_except=("2.*", "4.*"))).build_model()
    assert torch.equal(found.state_dict()["0.weight"], model.state_dict()["0.weight"])


def test_lengths_and_directions_that_were_saved_become_the_weights_of_a_plain_model(tmp_path: Path) -> None:
    model = digits().build_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    normalise_weights(model)
    save_model(tmp_path / "run", model.state_dict(), {})
    found = with_initial_weights(digits(), start(tmp_path / "run")).build_model().state_dict()
    assert found.keys() == before.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, before[name])


def test_a_model_is_drawn_then_loaded_then_frozen_then_normalised(tmp_path: Path) -> None:
    save_model(tmp_path / "run", digits().build_model().state_dict(), {})
    initial = start(tmp_path / "run", init_except=("2.*",), init="orthogonal", freeze=("0.*",), weight_norm=True)
    model: Any = with_initial_weights(digits(), initial).build_model()
    drawn = model[2].weight
    torch.testing.assert_close(drawn @ drawn.t(), torch.eye(10), rtol=1e-5, atol=1e-5)
    saved = nn.Linear(64, 32).state_dict().keys()
    assert model[0].state_dict().keys() == saved  # a frozen layer is not normalised
    assert not model[0].weight.requires_grad
    assert hasattr(model[2], "parametrizations")
