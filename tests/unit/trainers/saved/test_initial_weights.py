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
from orchestray.trainers.core.model_state import StateKeeper
from orchestray.trainers.core.weights import convert
from orchestray.trainers.saved.initial_weights import with_initial_weights
from orchestray.trainers.saved.trained_model import write_model
from support.few_bits import quantized_digits
from support.training import digits


@pytest.mark.parametrize("form", ["run", "folder", "safetensors", "torch"])
def test_weights_come_from_a_run_a_folder_or_a_file(tmp_path: Path, form: str) -> None:
    model = digits().build_model()
    save_model(tmp_path / "run" / "model", model.state_dict(), {})
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    folder = tmp_path / "run" / "model"
    places = {"run": folder.parent, "folder": folder, "safetensors": folder / "model.safetensors"}
    place = places.get(form, tmp_path / "weights.pt")
    found = with_initial_weights(digits(), str(place), "float32").build_model().state_dict()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


def test_weights_of_another_model_are_refused_with_what_differs(tmp_path: Path) -> None:
    save_model(tmp_path / "deep", digits(hidden=[8, 8]).build_model().state_dict(), {})
    save_model(tmp_path / "wide", digits(hidden=[64]).build_model().state_dict(), {})
    with pytest.raises(ConfigError, match=r"not of this model: .* not in the model: 4\.bias, 4\.weight"):
        with_initial_weights(digits(), str(tmp_path / "deep"), "float32").build_model()
    with pytest.raises(ConfigError, match=r"not of this model: .* of another kind: .* is float32 \[64"):
        with_initial_weights(digits(), str(tmp_path / "wide"), "float32").build_model()
    with pytest.raises(ConfigError, match="no weights at"):
        with_initial_weights(digits(), str(tmp_path / "nothing"), "float32").build_model()


def test_a_quantized_model_begins_with_the_weights_of_floating_point_numbers(tmp_path: Path) -> None:
    model, task = digits().build_model(), quantized_digits("twn", task=digits)()
    save_model(tmp_path / "run" / "model", model.state_dict(), {})
    found: Any = with_initial_weights(task, str(tmp_path / "run"), "float32").build_model()
    assert torch.equal(found[0].parametrizations.weight.original, model.state_dict()["0.weight"])
    assert torch.equal(found[0].bias, model.state_dict()["0.bias"])
    assert len(found[0].weight.unique()) == 3
    save_model(tmp_path / "quantized" / "model", found.state_dict(), {})
    again: Any = with_initial_weights(task, str(tmp_path / "quantized"), "float32").build_model()
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
    found: Any = with_initial_weights(task, str(tmp_path / form), precision).build_model()  # type: ignore[arg-type]
    assert found.count == 7
    assert all(torch.equal(one, two) for one, two in zip(found.parameters(), model.parameters(), strict=True))
