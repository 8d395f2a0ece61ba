"""Layouts that a model does not fit are refused by name before anything is started, with what would fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from orchestray.platform.errors import ConfigError
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.tasks.digits import Digits
from orchestray.trainers.validate.refuse import check_layout

CONFIGS = Path(__file__).parents[4] / "configs" / "train"


class Normalised(Digits):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 10))


def problem_of(*overrides: str) -> str:
    config = load_train_config(CONFIGS / "digits.yaml", overrides)
    with pytest.raises(ConfigError) as caught:
        check_layout(config, label="digits.yaml")
    [problem] = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "strategy.network={pipeline: 9}",
            "digits.yaml: strategy.network.pipeline: the model has 5 layers that a pipeline can cut between, too few",
        ),
        (
            "strategy.network={pipeline: 2, schedule: interleaved_1f1b, stages_per_worker: 3}",
            "digits.yaml: strategy.network.pipeline: the model has 5 layers",
        ),
        (
            "strategy.network={pipeline: 2, split: [layer]}",
            "digits.yaml: strategy.network.split: there is no layer 'layer'",
        ),
        (
            "strategy.network={pipeline: 3, split: ['2']}",
            "digits.yaml: strategy.network.split: the names make 2 stages, and the pipeline has 3",
        ),
        (
            "strategy.network={tensor: 200}",
            "digits.yaml: strategy.network.tensor: nothing in the model was found to split over 200 workers",
        ),
        ("strategy.network={tensor: 2, plan: channels}", "digits.yaml: strategy.network.plan: The plan 'channels'"),
        ("strategy.network={tensor: 2, plan: branches}", "digits.yaml: strategy.network.plan: The plan 'branches'"),
        ("strategy.network={tensor: 2, plan: one_weird_trick}", "digits.yaml: strategy.network.plan: The model itself"),
    ],
)
def test_a_layout_that_the_model_does_not_fit_is_refused(override: str, sentence: str) -> None:
    problem = problem_of(override)
    assert problem.startswith(sentence), problem


PLANNED = """
from orchestray.trainers.tasks.digits import Digits

class Planned(Digits):
    def tensor_plan(self, model):
        return {"0": "output", "3": "input"}

class Choosing(Digits):
    def build_model(self):
        from torch import nn
        class Choice(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(64, 10)
            def forward(self, x):
                if x.sum() > 0:
                    return self.layer(x)
                return -self.layer(x)
        return Choice()
"""


def test_a_plan_that_names_a_module_that_is_not_there_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "planned.py"
    file.write_text(PLANNED)
    problem = problem_of(f"task={{type: '{file}:Planned', hidden: [8]}}", "strategy.network={tensor: 2}")
    assert "'3'" in problem


def test_a_model_that_cannot_be_cut_is_refused_with_the_line(tmp_path: Path) -> None:
    file = tmp_path / "choosing.py"
    file.write_text(PLANNED)
    problem = problem_of(f"task={{type: '{file}:Choosing'}}", "strategy.network={pipeline: 2}")
    line = 1 + PLANNED.splitlines().index("                if x.sum() > 0:")
    assert f"choosing.py, line {line}" in problem or f"choosing.py:{line}" in problem
    assert "layers(model)" in problem


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_config_that_comes_along_fits_its_model(file: Path) -> None:
    has_teacher = "\ndistill:" in file.read_text(encoding="utf-8")  # which another command leaves
    check_layout(load_train_config(file, ["distill=null"] if has_teacher else []))


def test_more_shards_than_the_model_has_parameters_are_refused_before_anything_starts() -> None:
    problem = problem_of("strategy.exchange={type: parameter_server, shards: 1000000}", "strategy.network.data=2")
    assert problem.startswith("digits.yaml: strategy.exchange.shards: 1000000 shards cannot share ")
    assert problem.endswith("; use at most " + problem.split("share ")[1].split()[0])


def test_choosing_among_gradients_that_batch_normalisation_makes_parts_of_one_is_refused() -> None:
    robust = ["strategy.network.data=3", "strategy.aggregation={type: median, byzantine: 1}"]
    task = {"type": f"{Path(__file__)}:Normalised"}
    data = {
        "name": "cnn",
        "task": task,
        "train": {"batch_size": 8, "steps": 1, "optimizer": {"type": "sgd", "lr": 0.1}},
    }
    with pytest.raises(ConfigError) as caught:
        check_layout(load_train_config(data, robust), label="digits.yaml")
    [problem] = caught.value.problems
    assert problem.startswith("digits.yaml: strategy.aggregation: median chooses among the workers' gradients")
    assert problem.endswith("set train.batch_norm to local")
    check_layout(load_train_config(data, [*robust, "train.batch_norm=local"]))
    check_layout(load_train_config(CONFIGS / "digits.yaml", robust))  # without it there is nothing to say
