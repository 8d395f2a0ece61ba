"""Weights that a run starts with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from orchestray.platform.errors import ConfigError
from orchestray.platform.run.model_files import save_model
from orchestray.trainers.saved.initial_weights import with_initial_weights
from support.training import digits


@pytest.mark.parametrize("form", ["run", "folder", "safetensors", "torch"])
def test_weights_come_from_a_run_a_folder_or_a_file(tmp_path: Path, form: str) -> None:
    model = digits().build_model()
    save_model(tmp_path / "run" / "model", model.state_dict(), {})
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    folder = tmp_path / "run" / "model"
    places = {"run": folder.parent, "folder": folder, "safetensors": folder / "model.safetensors"}
    place = places.get(form, tmp_path / "weights.pt")
    found = with_initial_weights(digits(), str(place)).build_model().state_dict()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


def test_weights_of_another_model_are_refused_with_what_differs(tmp_path: Path) -> None:
    save_model(tmp_path / "deep", digits(hidden=[8, 8]).build_model().state_dict(), {})
    save_model(tmp_path / "wide", digits(hidden=[64]).build_model().state_dict(), {})
    with pytest.raises(ConfigError, match=r"not of this model: the model has no 4\.bias, 4\.weight"):
        with_initial_weights(digits(), str(tmp_path / "deep")).build_model()
    with pytest.raises(ConfigError, match=r"does not fit the model: size mismatch for .*, 64"):
        with_initial_weights(digits(), str(tmp_path / "wide")).build_model()
    with pytest.raises(ConfigError, match="no weights at"):
        with_initial_weights(digits(), str(tmp_path / "nothing")).build_model()
