"""The subject of an analysis is what a config, a task or a class says; what cannot be analysed is a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from orchestray.platform.errors import ConfigError, TaskError
from orchestray.trainers.planning.subject import subject_of

ROOT = Path(__file__).parents[4]
MODULES = """
from torch import nn

class Own(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        float(self.a.weight.detach().sum())  # cannot be built without values
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x))

class Lazy(nn.LazyLinear):
    def __init__(self):
        super().__init__(2)

def pair():
    return nn.Bilinear(4, 3, 2)

class Task:
    def build_model(self): return Own()
    def example_inputs(self):
        import torch
        return torch.ones(4)
    def dataset(self, split): raise FileNotFoundError("elsewhere")
    def to_batch(self, columns): raise AssertionError
    def loss(self, outputs, batch): return outputs.mean()
    def metrics(self, outputs, batch): return {}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(MODULES)
    return str(tmp_path / "own.py")


def test_a_config_s_model_comes_with_its_batch_and_its_loss() -> None:
    subject = subject_of(str(ROOT / "configs/train/digits.yaml"), ["train.batch_size=7"])
    assert (subject.batch_size, subject.inputs.shape, subject.notes) == (7, (7, 64), ())
    loss = subject.forward()
    assert (loss.device.type, loss.shape) == ("meta", ())
    assert all(each.is_meta for each in subject.model.parameters())


def test_a_module_a_function_and_a_task_whose_data_is_elsewhere(file: str) -> None:
    subject = subject_of(f"{file}:Own", shapes=["5,4"])
    assert (subject.name, subject.batch_size) == ("Own", 5)
    pair = subject_of(f"{file}:pair", shapes=["6,4", "6,3:float32"])
    assert pair.forward().shape == ()
    task = subject_of(f"{file}:Task")
    assert task.inputs.shape == (1, 4)
    assert task.notes == ("no loss: the task's data cannot be read here (DataError); the outputs are added up",)


def test_tied_parameters_of_a_model_that_is_built_with_values_stay_tied_on_meta(file: str) -> None:
    model = subject_of(f"{file}:Tied", shapes=["5,4"]).model
    assert all(each.is_meta for each in model.parameters())
    assert sum(each.numel() for each in model.parameters()) == 16 + 4 + 4


@pytest.mark.parametrize("shape", ["", "a", "3,0", "4,4:floaty", "4,-1", "2,2:int"])
def test_a_shape_that_is_none_is_refused_unless_torch_knows_it(file: str, shape: str) -> None:
    if shape == "2,2:int":
        assert subject_of(f"{file}:Own", shapes=[shape]).inputs[0].dtype == torch.int32
        return
    with pytest.raises(ConfigError, match="--inputs: must be sizes"):
        subject_of(f"{file}:Own", shapes=[shape])


def test_lazy_layers_have_the_shapes_that_their_inputs_give_them(file: str) -> None:
    subject = subject_of(f"{file}:Lazy", shapes=["3,4"])
    assert [tuple(each.shape) for each in subject.model.parameters()] == [(2, 4), (2,)]
    with pytest.raises(TaskError, match="Lazy cannot be run, as its lazy layers must be: "):
        subject_of(f"{file}:Lazy", shapes=["3,4", "3,4"])


def test_a_module_without_shapes_and_a_class_that_is_not_there_are_sentences(file: str) -> None:
    with pytest.raises(ConfigError, match="give the shapes of its inputs"):
        subject_of(f"{file}:Own")
    with pytest.raises(TaskError, match="there is no class Missing"):
        subject_of(f"{file}:Missing", shapes=["1"])


def test_arguments_that_would_not_count_are_refused_and_a_file_without_a_class_asks_for_it(file: str) -> None:
    with pytest.raises(
        ConfigError, match=r"--inputs \(3,4\): .*digits.yaml has the inputs of its task; leave them out"
    ):
        subject_of(str(ROOT / "configs/train/digits.yaml"), shapes=["3,4"])
    with pytest.raises(ConfigError, match=r"--inputs \(3,4\): the task .*own.py:Task has its own"):
        subject_of(f"{file}:Task", shapes=["3,4"])
    with pytest.raises(ConfigError, match=r"keys of a config \(train.seed=1\): .*own.py:Own is none"):
        subject_of(f"{file}:Own", ["train.seed=1"], ["3,4"])
    with pytest.raises(ConfigError, match="name the class in it as well"):
        subject_of(file, shapes=["3,4"])
