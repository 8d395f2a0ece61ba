"""`orchestray runs compare`: weights and losses of runs against each other's."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from orchestray.platform.run.directory import RunDirectory
from orchestray.platform.run.model_files import save_model
from orchestray.platform.run.writer import RunWriter
from orchestray.trainers.config.load import dump_yaml, load_train_config
from orchestray.trainers.saved.compare import compare_losses, compare_tensors
from support.cli import orchestray_here as orchestray

WEIGHTS = {"first.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "first.bias": torch.tensor([0.5, -0.5])}
LOSSES = [1.0, 0.5, 0.25]


def make_run(
    runs_dir: Path, name: str, weights: Mapping[str, Tensor] | None = WEIGHTS, losses: Sequence[float] = LOSSES
) -> None:
    train = {"batch_size": 8, "steps": 3, "optimizer": {"type": "sgd", "lr": 0.1}}
    with RunDirectory.create(runs_dir, name) as run:
        run.write_config(dump_yaml(load_train_config({"name": name, "task": {"type": "digits"}, "train": train})))
        with RunWriter(run, clock=lambda: 2.0) as writer:
            writer.metrics([{"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)])
            writer.metrics([{"step": len(losses), "split": "validation", "loss": 9.0}])
        if weights is not None:
            save_model(run.paths.model, weights, {"task": {"type": "digits"}})


def moved(difference: float) -> dict[str, Tensor]:
    return {**WEIGHTS, "first.bias": WEIGHTS["first.bias"] + torch.tensor([0.0, difference])}


def compare_json(runs_dir: Path, *names: str) -> list[dict[str, Any]]:
    done = orchestray("runs", "compare", *names, "--runs-dir", runs_dir, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert told["reference"] == names[0]
    runs: list[dict[str, Any]] = told["runs"]
    assert [run["name"] for run in runs] == list(names[1:])
    return runs


def test_each_run_is_compared_with_the_first_and_says_where_it_differs_most(tmp_path: Path) -> None:
    make_run(tmp_path, "a")
    make_run(tmp_path, "same")
    make_run(tmp_path, "other", moved(0.25), [1.0, 0.75, 0.125, 0.1])
    same, other = compare_json(tmp_path, "a", "same", "other")
    assert same["weights"]["same_bits"] is True
    assert same["losses"]["same_bits"] is True
    assert (same["weights"]["max_difference"], same["weights"]["tensor"]) == (0.0, None)
    assert (other["weights"]["max_difference"], other["weights"]["tensor"]) == (0.25, "first.bias")
    assert other["weights"]["same_bits"] is False
    assert (other["losses"]["max_difference"], other["losses"]["step"]) == (0.25, 2)
    assert (other["losses"]["num_compared"], other["losses"]["num_only_in_one"]) == (3, 1)


def test_the_table_has_a_row_a_run_and_names_what_could_not_be_compared(tmp_path: Path) -> None:
    make_run(tmp_path, "a")
    make_run(tmp_path, "same")
    make_run(tmp_path, "wide", {"first.weight": torch.zeros(2, 3), "second.bias": torch.zeros(1)})
    done = orchestray("runs", "compare", "a", "same", tmp_path / "wide", "--runs-dir", tmp_path)
    assert done.returncode == 0
    heading, same, wide, *remarks = done.stdout.splitlines()
    assert heading.startswith("against a ")
    assert same.split() == ["same", "the", "same", "bits", "-", "the", "same", "bits", "-"]
    assert wide.split() == ["wide", "-", "-", "the", "same", "bits", "-"]
    assert remarks == [
        "wide lacks first.bias.",
        "wide alone has second.bias.",
        "wide has other shapes: first.weight [2, 2] -> [2, 3].",
    ]


def test_a_run_that_is_not_there_ends_with_status_2(tmp_path: Path) -> None:
    make_run(tmp_path, "a")
    done = orchestray("runs", "compare", "a", "b", "--runs-dir", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"there is no run in {tmp_path / 'b'}" in done.stderr


def test_a_run_without_a_model_ends_with_status_2_and_says_what_to_do(tmp_path: Path) -> None:
    make_run(tmp_path, "a")
    make_run(tmp_path, "b", weights=None)
    done = orchestray("runs", "compare", "a", "b", "--runs-dir", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "the run b (died) has no trained model to compare" in done.stderr
    assert "--resume" in done.stderr


def test_one_run_alone_is_answered_with_an_example_and_status_2(tmp_path: Path) -> None:
    make_run(tmp_path, "a")
    done = orchestray("runs", "compare", "a", "--runs-dir", tmp_path)
    assert done.returncode == 2
    assert "For example: orchestray runs compare" in done.stderr


def test_the_usage_line_and_the_help_have_the_names_and_an_example() -> None:
    told = orchestray("runs", "compare", "--help").stdout
    assert "runs compare [OPTIONS] NAME..." in told
    assert "Example: orchestray runs compare alone " in told


def test_zeros_of_either_sign_are_equal_but_not_the_same_bits() -> None:
    found = compare_tensors({"w": torch.zeros(2)}, {"w": torch.tensor([0.0, -0.0])})
    assert (found.max_difference, found.tensor, found.same_bits) == (0.0, None, False)


def test_equal_values_of_another_dtype_are_not_the_same_bits() -> None:
    found = compare_tensors({"w": torch.ones(2)}, {"w": torch.ones(2, dtype=torch.float64)})
    assert (found.max_difference, found.same_bits) == (0.0, False)
    assert found.dtypes == {"w": ["float32", "float64"]}


@pytest.mark.parametrize("other", [1.0, math.inf, -math.inf])
def test_a_weight_that_is_not_a_number_in_one_run_is_infinitely_far(other: float) -> None:
    tensors = {"v": torch.ones(3), "w": torch.tensor([0.0, math.nan])}
    found = compare_tensors(tensors, {"v": torch.zeros(3), "w": torch.tensor([0.0, other])})
    assert (found.max_difference, found.tensor) == (math.inf, "w")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_as_little_a_number_in_both_runs_does_not_differ(value: float) -> None:
    found = compare_tensors({"w": torch.tensor([value, 1.0])}, {"w": torch.tensor([value, 1.5])})
    assert (found.max_difference, found.tensor) == (0.5, "w")


def test_differences_smaller_than_float32_can_tell_are_found_in_float64() -> None:
    wanted = torch.tensor([1.0], dtype=torch.float64)
    found = compare_tensors({"w": wanted}, {"w": wanted + 2**-50})
    assert found.max_difference == 2**-50


def test_whole_numbers_and_empty_tensors_are_compared_too() -> None:
    reference = {"count": torch.tensor(7), "empty": torch.zeros(0), "mask": torch.tensor([True, False])}
    found = compare_tensors(reference, {**reference, "count": torch.tensor(9)})
    assert (found.max_difference, found.tensor, found.num_compared) == (2.0, "count", 3)


def test_losses_that_are_not_numbers_are_infinitely_far_from_those_that_are() -> None:
    found = compare_losses({1: 0.5, 2: math.nan, 3: math.nan}, {1: 0.75, 2: math.nan, 3: 1.0})
    assert (found.max_difference, found.step, found.same_bits) == (math.inf, 3, False)


def test_runs_without_a_common_step_have_no_difference_of_losses() -> None:
    found = compare_losses({1: 0.5}, {2: 0.5})
    assert (found.max_difference, found.num_compared, found.num_only_in_one) == (None, 0, 2)
    assert not found.same_bits
