"""The costs of layers add up to the whole, and are those of closed forms."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.errors import TaskError
from orchestray.trainers.planning.analyse import analyse
from orchestray.trainers.planning.subject import Subject


def subject(model: nn.Module, *shape: int) -> Subject:
    return Subject("model", model.to("meta").train(), torch.empty(shape, device="meta"), shape[0])


def test_layers_add_up_to_the_whole_in_work_bytes_parameters_and_what_is_saved() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    analysis = analyse(subject(model, 4, 3, 8, 8))
    layers = analysis.layers
    for name in ("work", "multiplications", "num_bytes"):
        for which in ("forward", "backward"):
            parts = sum(getattr(getattr(layer, which), name) for layer in layers)
            assert parts == getattr(getattr(analysis, which), name)
    assert sum(layer.parameters for layer in layers) == analysis.parameters
    assert analysis.parameter_bytes == 4 * analysis.parameters
    assert sum(layer.saved_bytes for layer in layers) == analysis.saved_bytes
    assert analysis.uncounted == {}
    assert json.loads(json.dumps(analysis.to_json()))["layers"][0]["name"] == layers[0].name


def test_a_linear_layer_keeps_its_inputs_and_passes_on_its_outputs() -> None:
    analysis = analyse(subject(nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 2)), 3, 6))
    first, second = (layer for layer in analysis.layers if layer.name)
    assert (first.saved_bytes, second.saved_bytes) == (3 * 6 * 4, 3 * 10 * 4)
    assert (first.output_bytes, second.output_bytes) == (3 * 10 * 4, 3 * 2 * 4)
    assert first.forward.multiplications == 3 * 6 * 10
    assert first.backward.multiplications == 3 * 6 * 10  # its inputs need no gradient
    assert second.backward.multiplications == 2 * 3 * 10 * 2


def test_a_split_of_images_exchanges_half_a_kernel_of_rows() -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 5, padding=2), nn.Conv2d(2, 2, 1))
    first, second = (layer for layer in analyse(subject(model, 4, 3, 8, 16)).layers if layer.name)
    assert (first.halo_bytes, second.halo_bytes) == (4 * 3 * 16 * 2 * 4, 0)


def test_the_critical_path_has_the_depth_of_the_step_and_leaves_out_what_runs_beside_it() -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.long = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
            self.short = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.long(x) + self.short(x)

    analysis = analyse(subject(Beside(), 4, 64))
    names = [name for name, _ in analysis.critical_path]
    assert {"long.0", "long.1"} <= set(names)
    assert "short" not in names
    assert analysis.forward.depth < sum(layer.forward.depth for layer in analysis.layers)


def test_a_model_that_looks_at_values_is_a_sentence() -> None:
    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum().item() > 0 else x

    with pytest.raises(TaskError, match="model cannot be traced without values: "):
        analyse(subject(Looks(3, 3), 2, 3))
