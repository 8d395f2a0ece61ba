"""A task whose model is a genome's network: it trains, and is rebuilt from what the run leaves, wherever that is."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from orchestray.platform.errors import ConfigError, OrchestrayError, TaskError
from orchestray.platform.task import TaskSource
from orchestray.search.spaces.searched_task import TYPE, SearchedTask, searched_task_section
from orchestray.trainers import tasks
from support.pairs_task import PAIRS

CHAIN = {
    "layer0.kind": "conv",
    "layer0.channels": 8,
    "layer0.kernel": 3,
    "layer1.kind": "pool",
    "layer1.pool": "max",
    "layer2.kind": "end",
    "last": "flatten",
}
OWN_TASK = """
    import pyarrow as pa, torch
    from torch import nn

    class Points:
        def __init__(self, width=4):
            self.width = width
        def build_model(self):
            return nn.Linear(self.width, 3)
        def dataset(self, split):
            rows = torch.arange(8.0).tolist()
            return pa.table({"x": [[row] * self.width for row in rows], "y": [int(row) % 3 for row in rows]})
        def to_batch(self, columns):
            return {"inputs": torch.tensor(columns["x"].to_pylist()), "targets": torch.tensor(columns["y"].to_pylist())}
        def loss(self, outputs, batch):
            return nn.functional.cross_entropy(outputs, batch["targets"])
        def metrics(self, outputs, batch):
            return {}
        def layers(self, model):
            return [model]
        def example_inputs(self):
            return torch.zeros(self.width)
"""
OWN_SPACE = """
    from torch import nn

    class Widths:
        def sample(self, rng):
            return int(rng.integers(1, 9))
        def mutate(self, genome, rng):
            return genome + 1
        def crossover(self, a, b, rng):
            return min(a, b)
        def build(self, genome, input_shape, num_outputs):
            return nn.Sequential(nn.Linear(input_shape[0], genome), nn.ReLU(), nn.Linear(genome, num_outputs))
"""


def built(section: dict[str, Any]) -> SearchedTask:
    """Build the task of a `task` section, after it has been through JSON."""
    section = json.loads(json.dumps(section))
    kind = section.pop("type")
    task = tasks.build(TaskSource(kind, section))
    assert isinstance(task, SearchedTask)
    return task


@pytest.fixture
def own_files(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "own_task.py").write_text(dedent(OWN_TASK))
    (tmp_path / "own_space.py").write_text(dedent(OWN_SPACE))
    return f"{tmp_path}/own_task.py:Points", f"{tmp_path}/own_space.py:Widths"


def test_the_shapes_are_those_of_the_first_batch_and_of_the_tasks_own_model() -> None:
    flat = built(searched_task_section({"type": "digits"}, "chain", CHAIN))
    image = built(searched_task_section({"type": "digits", "model": "cnn", "hidden": [4]}, "chain", CHAIN))
    assert flat.shapes() == ((64,), 10)
    assert image.shapes() == ((1, 8, 8), 10)
    for task in (flat, image):
        inputs = task.to_batch(task.dataset("train").slice(0, 3))["inputs"]
        assert task.build_model()(inputs).shape == (3, 10)


def test_the_shapes_leave_no_trace_in_the_random_numbers() -> None:
    task = built(searched_task_section({"type": "digits"}, "chain", CHAIN))
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(task.build_model().state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_model_that_is_made_on_the_meta_device_finds_its_shapes() -> None:
    task = built(searched_task_section({"type": "digits"}, "chain", CHAIN))
    with torch.device("meta"):
        model = task.build_model()
    assert all(parameter.is_meta for parameter in model.parameters())


def test_the_texts_of_own_files_travel_in_the_section(own_files: tuple[str, str]) -> None:
    task_type, space = own_files
    section = searched_task_section({"type": task_type, "width": 5}, space, 7)
    for place in own_files:
        Path(place.rpartition(":")[0]).unlink()
    model = built(section).build_model()
    assert [tuple(p.shape) for p in model.parameters()] == [(7, 5), (7,), (3, 7), (3,)]


def test_rebuild_arguments_need_neither_data_nor_files(own_files: tuple[str, str]) -> None:
    task_type, space = own_files
    section: dict[str, Any] = {"type": TYPE, "task": {"type": task_type}, "space": space, "genome": 2}
    found = built(section).rebuild_arguments()
    for place in own_files:
        Path(place.rpartition(":")[0]).unlink()
    again = built(
        {
            **section,
            **found,
            "files": {path: text.replace("torch.arange(8.0)", "(1 / 0)") for path, text in found["files"].items()},
        }
    )
    assert again.build_model()[0].out_features == 2


def test_optional_methods_are_the_tasks_save_those_about_its_own_model(own_files: tuple[str, str]) -> None:
    task = built(
        searched_task_section(
            {"type": own_files[0]}, "chain", {"layer0.kind": "dense", "layer0.width": 32, "layer1.kind": "end"}
        )
    )
    assert task.example_inputs().shape == (4,)
    with pytest.raises(AttributeError):
        _ = task.layers
    with pytest.raises(AttributeError):
        _ = task.tensor_plan


@pytest.mark.parametrize(
    ("space", "genome", "says"),
    [
        ("chain", {**CHAIN, "layer0.kernel": 4}, "layer0.kernel must be one of"),
        ("chain", {}, "lacks the choice 'layer0.kind'"),
        ("chain", {**CHAIN, "layer7.kind": "conv"}, "do not come up: layer7.kind"),
        ("chain", [1], "is a mapping of choices"),
        ("genetic", {"stage0.1-2": 2}, "stage0.1-2 must be one of [0, 1], and is 2"),
        ("hierarchical", ["1"], "a genome of this space has"),
        ("own", -4, "the genome -4 cannot be built: RuntimeError"),
    ],
)
def test_a_genome_that_cannot_be_built_is_named_with_the_reason(
    space: str, genome: object, says: str, own_files: tuple[str, str]
) -> None:
    task = built(searched_task_section({"type": "digits"}, own_files[1] if space == "own" else space, genome))
    with pytest.raises(TaskError) as error:
        task.build_model()
    assert says in str(error.value)
    assert repr(genome) in str(error.value)


@pytest.mark.parametrize(
    ("space", "says"),
    [
        ("chian", "did you mean 'chain'?"),
        (
            {"space": "chain", "kernals": [3]},
            "search.architecture.kernals: is no argument of the space Chain (did you mean 'kernels'?)",
        ),
        ({"space": "chain", "kernels": [2]}, "search.architecture.kernels: must be odd, got 2"),
        ({"space": "cell", "operations": ["conv"]}, "search.architecture.operations: there are identity"),
        ({"space": "nowhere.py:Mine"}, "cannot read"),
        ({"space": "pathlib:Path"}, "lacks method 'sample(rng)'"),
        ({"space": "no_such_module_at_all:Mine"}, "there is no module no_such_module_at_all"),
        (5, "task.space: must be the name of a space"),
        ({"name": "chain"}, "task.space: must be the name of a space"),
    ],
)
def test_a_space_that_cannot_be_made_says_what_was_wanted(space: Any, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        SearchedTask({"type": "digits"}, space, CHAIN)
    assert says in str(error.value)


def test_a_task_whose_outputs_are_no_rows_of_numbers_is_refused() -> None:
    task = SearchedTask({"type": "python_source", "num_files": 3, "context": 4, "width": 8, "depth": 1}, "chain", CHAIN)
    with pytest.raises(TaskError, match="this task's inputs are torch"):
        task.build_model()


def test_a_task_of_several_inputs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pairs.py").write_text(PAIRS)
    task = SearchedTask({"type": f"{tmp_path}/pairs.py:Pairs", "how": "tuple"}, "chain", CHAIN)
    with pytest.raises(TaskError, match=r"take one tensor, and this task's inputs are a tuple of a tensor"):
        task.build_model()


def test_an_own_task_that_fails_is_named(own_files: tuple[str, str]) -> None:
    with pytest.raises(OrchestrayError, match="widht"):
        SearchedTask({"type": own_files[0], "widht": 3}, "chain", CHAIN)
