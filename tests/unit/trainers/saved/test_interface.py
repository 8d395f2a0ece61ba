"""The interface of a trained model is written with it, and read back as it was."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from orchestray.platform.data.endless import Endless
from orchestray.platform.data.nested import tensors_in
from orchestray.platform.data.tensors import to_tensor
from orchestray.platform.errors import CheckpointError
from orchestray.trainers.core.model_state import ModelState
from orchestray.trainers.saved.interface import Interface, example_of, read_interface, saved_interface
from orchestray.trainers.saved.trained_model import write_model
from orchestray.trainers.tasks.digits import Digits

STATE = ModelState({"weight": torch.zeros(1)})


def written(directory: Path, task: Any, interface: Any = None) -> Interface:
    write_model(directory / "model", STATE, {}, task, interface)
    found = read_interface(directory / "model")
    assert found is not None
    return found


@pytest.mark.parametrize(
    "inputs",
    [
        torch.arange(6.0, dtype=torch.float64).view(2, 3),
        torch.tensor(3),
        (torch.ones(2, dtype=torch.bfloat16), torch.zeros(0, dtype=torch.int64)),
        [torch.ones(1), None],
        {"b": torch.ones(2), "a": {"deep": (torch.zeros(3), "mean", 2, 0.5, True)}},
    ],
)
def test_an_example_is_read_back_with_its_containers_types_and_values(inputs: Any, tmp_path: Path) -> None:
    found = written(tmp_path, SimpleNamespace(), Interface(inputs)).example

    assert without_tensors(found) == without_tensors(inputs)
    for mine, right in zip(tensors_in(found), tensors_in(inputs), strict=True):
        assert mine.dtype == right.dtype
        assert torch.equal(mine, right)


def without_tensors(nested: Any) -> str:
    if isinstance(nested, dict):
        return repr({name: without_tensors(value) for name, value in nested.items()})
    if isinstance(nested, tuple | list):
        return type(nested).__name__ + repr([without_tensors(value) for value in nested])
    return "a tensor" if torch.is_tensor(nested) else repr(nested)


def test_a_built_in_task_has_its_classes_and_the_names_types_and_shapes_of_its_inputs(tmp_path: Path) -> None:
    found = written(tmp_path, Digits(hidden=[4]))
    assert found.class_names == tuple(range(10))
    described = json.loads((tmp_path / "model" / "model.json").read_text())["interface"]
    assert described["inputs"] == [{"name": "inputs", "dtype": "float32", "shape": [64]}]


def test_the_metrics_that_are_better_when_lower_are_the_loss_and_those_that_the_task_names(tmp_path: Path) -> None:
    task = SimpleNamespace(example_inputs=lambda: [1.0], lower_is_better=("word_errors",))
    assert written(tmp_path, task).lower_is_better == ("loss", "word_errors")


def test_names_in_arrays_are_written_as_lists_and_one_metric_is_no_list_of_letters(tmp_path: Path) -> None:
    named = {"class_names": np.array(["a", "b"]), "feature_names": np.array(["x", "y"]), "lower_is_better": "rmse"}
    found = written(tmp_path, SimpleNamespace(example_inputs=lambda: [1.0, 2.0], **named))
    assert (found.class_names, [*found.feature_names]) == (("a", "b"), ["x", "y"])
    assert found.lower_is_better == ("loss", "rmse")


@pytest.mark.parametrize("named", [["x", "y"], {"x": 1, "y": 1}])
def test_the_names_of_features_are_kept_in_order_with_their_sizes(named: Any, tmp_path: Path) -> None:
    task = SimpleNamespace(example_inputs=lambda: [1.0, 2.0], feature_names=named)
    assert [*written(tmp_path, task).feature_names.items()] == [("x", 1), ("y", 1)]


def test_a_model_of_before_names_of_features_has_those_of_its_task(tmp_path: Path) -> None:
    task: Any = SimpleNamespace(example_inputs=lambda: [1.0, 2.0], feature_names=("y", "x"))
    written(tmp_path, task)
    path = tmp_path / "model" / "model.json"
    described = json.loads(path.read_text())
    del described["interface"]["feature_names"]
    path.write_text(json.dumps(described))
    assert [*saved_interface(tmp_path / "model", lambda: task).feature_names] == ["y", "x"]


def test_the_first_row_that_is_given_is_taken_and_the_data_are_not_opened(tmp_path: Path) -> None:
    task = SimpleNamespace(to_batch=lambda columns: {"inputs": to_tensor(columns["x"])})
    assert written(tmp_path, task, lambda: pa.table({"x": [0.25]})).example == 0.25


def test_a_model_whose_sample_is_unknown_is_written_with_the_reason(tmp_path: Path) -> None:
    task = SimpleNamespace(to_batch=lambda _columns: {"inputs": slice(3)})
    found = written(tmp_path, task, lambda: pa.table({"x": [0.25]}))
    assert found.example is None
    assert "hold a slice" in found.no_example


def test_a_model_of_before_interfaces_has_none(tmp_path: Path) -> None:
    written(tmp_path, Digits(hidden=[4]))
    path = tmp_path / "model" / "model.json"
    described = json.loads(path.read_text())
    del described["interface"]
    path.write_text(json.dumps(described))
    assert read_interface(tmp_path / "model") is None


@pytest.mark.parametrize("damage", [{}, {"class_names": 3, "lower_is_better": []}, {"example": {"tensor": 7}}, []])
def test_a_damaged_interface_is_named(damage: Any, tmp_path: Path) -> None:
    written(tmp_path, Digits(hidden=[4]))
    path = tmp_path / "model" / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "interface": damage}))
    with pytest.raises(CheckpointError, match=r"the interface in the model\.json of .* is damaged"):
        read_interface(tmp_path / "model")


def test_a_task_whose_data_have_no_end_is_shown_by_their_first_row() -> None:
    task: Any = SimpleNamespace(
        dataset=lambda _split: Endless(lambda _number: [pa.table({"x": [0.25, 1.0]})]),
        to_batch=lambda columns: {"inputs": to_tensor(columns["x"])},
    )
    assert example_of(task) == torch.tensor(0.25, dtype=torch.float64)


@pytest.mark.parametrize(
    ("example", "wanted"),
    [
        ([1, 2], torch.tensor([1, 2])),
        ((1.0, 2.0), torch.tensor([1.0, 2.0])),
        (([1, 2], 3.0), (torch.tensor([1, 2]), torch.tensor(3.0))),
        ({"ids": [1, 2]}, {"ids": torch.tensor([1, 2])}),
    ],
)
def test_an_example_of_a_tasks_own_is_a_tensor_or_several(example: Any, wanted: Any) -> None:
    found = example_of(SimpleNamespace(example_inputs=lambda: example))  # type: ignore[arg-type]
    assert type(found) is type(wanted)
    for mine, right in zip(tensors_in(found), tensors_in(wanted), strict=True):
        assert mine.dtype == right.dtype
        assert torch.equal(mine, right)
