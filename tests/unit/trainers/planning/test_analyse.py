"""The costs of layers add up to the whole, and are those of closed forms."""

from __future__ import annotations

import itertools
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


def test_the_time_of_a_step_on_p_processors_is_between_the_bounds_of_its_work_and_its_depth() -> None:
    found = analyse(subject(nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 5)), 8, 30))
    work, depth = found.forward.work + found.backward.work, found.forward.depth + found.backward.depth
    alone, *several = found.bounds
    assert (alone.processors, alone.least, alone.most) == (1, work, work + depth)
    for each in several:
        assert each.most == pytest.approx(work / each.processors + depth)
        assert each.least == max(work / each.processors, depth)
    # Processors help until there are more than operations side by side: then the depth is left.
    assert several[0].least == work / 16
    assert several[-1].processors > work / depth
    assert several[-1].least == depth
    assert found.to_json()["bounds"][-1] == {"processors": 65_536, "least": depth, "most": several[-1].most}


def test_a_linear_layer_keeps_its_inputs_unless_they_are_the_batch_and_passes_on_its_outputs() -> None:
    analysis = analyse(subject(nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 2)), 3, 6))
    first, second = (layer for layer in analysis.layers if layer.name)
    assert (first.saved_bytes, second.saved_bytes) == (0, 3 * 10 * 4)
    assert (first.output_bytes, second.output_bytes) == (3 * 10 * 4, 3 * 2 * 4)
    assert first.forward.multiplications == 3 * 6 * 10
    assert first.backward.multiplications == 3 * 6 * 10  # its inputs need no gradient
    assert second.backward.multiplications == 2 * 3 * 10 * 2


def test_a_split_of_images_exchanges_half_a_kernel_of_rows_each_way() -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 5, padding=2), nn.Conv2d(2, 2, 1))
    first, second = (layer for layer in analyse(subject(model, 4, 3, 8, 16)).layers if layer.name)
    assert (first.halo_bytes, second.halo_bytes) == (2 * 4 * 3 * 16 * 2 * 4, 0)


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


def test_parameters_of_an_attention_s_parts_and_of_tied_layers_are_counted_once_and_tied_ones_are_named() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(20, 8)
            self.mix = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.unused = nn.Linear(3, 3).requires_grad_(requires_grad=False)
            self.out = nn.Linear(8, 20, bias=False)
            self.out.weight = self.words.weight

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(self.mix(self.words(x)))
            return out

    x = torch.zeros(2, 5, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        analysis = analyse(Subject("tied", Tied(), x, 2))
    parameters = {layer.name: layer.parameters for layer in analysis.layers}
    assert (parameters["words"], parameters["out"], parameters["unused"]) == (160, 0, 12)
    assert parameters["mix.self_attn"] == 4 * 8 * 8 + 4 * 8  # with its output's, which it uses itself
    assert sum(parameters.values()) == analysis.parameters
    assert "12 of the parameters are frozen: they have no gradients" in analysis.notes
    assert "out.weight is words.weight (tied), and counted there" in analysis.notes
    assert analysis.parameter_bytes == 4 * (analysis.parameters - 12)


def test_the_intervals_of_layers_hold_the_whole_of_the_longest_chain_and_nothing_ends_later() -> None:
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 2))
    analysis = analyse(subject(model, 3, 6))
    whole = sum(depth for _, depth in analysis.critical_path)
    parts = sorted(part for interval in analysis.intervals for part in interval.on_path)
    assert sum(end - begin for begin, end in parts) == whole == max(interval.end for interval in analysis.intervals)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(parts))
    assert {(interval.layer, interval.is_backward) for interval in analysis.intervals} >= {("0", False), ("2", True)}


def test_a_model_that_looks_at_values_is_a_sentence() -> None:
    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum().item() > 0 else x

    with pytest.raises(TaskError, match="model cannot be traced without values: "):
        analyse(subject(Looks(3, 3), 2, 3))


def test_an_operator_that_calls_functions_is_a_sentence_with_what_to_write() -> None:
    class Either(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, super().forward, torch.sin, (x,))

    with pytest.raises(TaskError, match=r"calls torch's operator cond, .*: have the model compute that by operations"):
        analyse(subject(Either(3, 3), 2, 3))


@pytest.mark.parametrize(
    ("layer", "note"),
    [
        (nn.LSTM(4, 4), "recurrences are counted by their operations"),
        (nn.TransformerEncoderLayer(4, 2, 8), "attention is counted by its operations"),
        (nn.Linear(4, 4), None),
    ],
)
def test_layers_of_which_a_kernel_keeps_other_bytes_are_noted(layer: nn.Module, note: str | None) -> None:
    notes = [each for each in analyse(subject(layer, 5, 3, 4)).notes if "kernel" in each]
    assert [each.partition(":")[0] for each in notes] == ([] if note is None else [note])
