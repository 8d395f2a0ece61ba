"""One file and one line add an exchange, a compression or an optimizer: toys of each show it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestray.platform.config.registry import Registry
from orchestray.platform.errors import ConfigError
from orchestray.trainers.optim.registry import OPTIMIZERS
from support.forked import Forked

EXCHANGE = """
from typing import Literal

from orchestray.platform.config.base import AboveZero
from orchestray.trainers.core.exchange_params import ExchangeParams
from orchestray.trainers.sync.common.combined_gradients import CombinedGradients


class ToyParams(ExchangeParams):
    '''The sum of the gradients, multiplied by a factor.'''

    type: Literal["toy"]
    '''The exchange `toy`.'''
    factor: AboveZero = 1.0
    '''Factor on the gradient.'''


class Toy(CombinedGradients):
    def __init__(self, factor=1.0):
        super().__init__()
        self._factor = factor

    def combine(self, gradients, flags):
        for gradient in gradients:
            self.joined().all_reduce(gradient)
        return [gradient * self._factor for gradient in gradients]
"""
OPTIMIZER = """
from typing import Literal

from orchestray.platform.config.base import AboveZero, Section
from orchestray.trainers.optim.optimizers import Optimizer


class ToyParams(Section):
    '''The sign of the gradient.'''

    type: Literal["toy"]
    '''The optimizer `toy`.'''
    lr: AboveZero
    '''Learning rate.'''


class Toy(Optimizer):
    slots = ()

    def _fresh(self, slot, parameter):
        return None

    def _update(self, params, grads, state, lr, *, fused):
        for parameter, grad in zip(params, grads):
            parameter.sub_(grad.sign(), alpha=lr)
"""
COMPRESSION = """
from typing import Literal

from orchestray.trainers.compression.params import Lossy
from orchestray.trainers.compression.half_precision import Float16


class ToyParams(Lossy):
    '''Half precision under another name.'''

    type: Literal["toy"]
    '''The compression `toy`.'''


class Toy(Float16):
    pass
"""
TRAIN = """
import json, sys
from importlib import import_module

module, registry, overrides, wrong, folder = sys.argv[1:]
sys.path.insert(0, folder)
getattr(import_module(module), registry).add("toy", "toy:ToyParams", "toy:Toy")

from orchestray.platform.errors import ConfigError
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.config.schema import TrainConfig
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.loop.replica import Replica
from support.training import digits, stream_of
from support.threads import run_replicas

overrides = ["train.epochs=null", "train.steps=3", *json.loads(overrides)]
config = load_train_config("configs/train/digits.yaml", overrides)
settings = ReplicaSettings.from_config(config, storage=folder, model_directory=folder)
try:
    load_train_config("configs/train/digits.yaml", [*overrides, wrong])
except ConfigError as error:
    problem = str(error)
task = digits()
replicas = [Replica(task, settings, stream_of(task, settings)) for _ in range(2)]


def run(collective):
    replica = replicas[collective.rank]
    replica.connect(collective)
    return replica.run(0.0)


outcomes = run_replicas(2, run)
schema = json.dumps(TrainConfig.model_json_schema())
print(json.dumps({"steps": outcomes[0].step, "problem": problem, "in_schema": "ToyParams" in schema}))
"""


@pytest.mark.parametrize(
    ("toy", "module", "registry", "overrides", "wrong", "problem"),
    [
        (
            EXCHANGE,
            "orchestray.trainers.sync.registry",
            "EXCHANGES",
            ["strategy.exchange={type: toy, factor: 0.5}"],
            "strategy.compression={type: qsgd}",
            "toy sends its tensors as they are, not as qsgd",
        ),
        (
            OPTIMIZER,
            "orchestray.trainers.optim.registry",
            "OPTIMIZERS",
            ["train.optimizer=null", "train.optimizer={type: toy, lr: 0.01}"],
            "train.optimizer.lr=-1",
            "must be",
        ),
        (
            COMPRESSION,
            "orchestray.trainers.compression.registry",
            "COMPRESSIONS",
            ["strategy.compression={type: toy}"],
            "strategy.compression.error_feedback=3",
            "must be",
        ),
    ],
    ids=["exchange", "optimizer", "compression"],
)
def test_one_file_and_one_line_add_a_choice_that_is_checked_in_the_schema_and_trains(
    tmp_path: Path, toy: str, module: str, registry: str, overrides: list[str], wrong: str, problem: str
) -> None:
    (tmp_path / "toy.py").write_text(toy)
    arguments = [module, registry, json.dumps(overrides), wrong, str(tmp_path)]
    with Forked(TRAIN, *arguments) as training:
        assert training.wait() == 0, training.printed()
        found = json.loads(training.printed().splitlines()[-1])
    assert found["steps"] == 3
    assert found["in_schema"]
    assert problem in found["problem"]


def test_a_name_that_is_not_there_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"train\.optimizer\.type: 'adan' is not an optimizer; .*did you mean 'adam'"):
        OPTIMIZERS.params("adan")
    with pytest.raises(ConfigError, match="is not an optimizer"):
        OPTIMIZERS.find("adan")


def test_a_choice_without_a_class_says_so() -> None:
    registry: Registry[object] = Registry("a.b", {"x": ("toy:Params", None)}, noun="an x")  # type: ignore[type-var]
    with pytest.raises(ConfigError, match=r"a\.b\.type: 'x' is not made of one class"):
        registry.find("x")
