"""The settings of torch that decide on bits hold in the process that trains, and what holds is reported."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.core.arithmetic import WORKSPACE, Arithmetic, arithmetic_here, settings_given_back
from support.search_loop import base
from support.tiny_task import TinyTask
from support.training import train


@pytest.fixture(autouse=True)
def _defaults(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(WORKSPACE, raising=False)
    yield
    Arithmetic().apply()


def settings(**keys: object) -> ReplicaSettings:
    data = base()
    config = load_train_config(data | {"train": {**data["train"], **keys}})
    return ReplicaSettings.from_config(config, storage="", model_directory="")


def test_what_the_config_says_holds_in_the_process_and_the_next_run_sets_it_back() -> None:
    settings(deterministic=True, float32_matmul_precision="high").arithmetic.apply()
    assert arithmetic_here() == {
        "deterministic": True,
        "float32_matmul_precision": "high",
        "cudnn_benchmark": False,
        "cudnn_tf32": True,
    }
    assert torch.backends.cudnn.deterministic
    assert os.environ[WORKSPACE] == ":4096:8"
    settings(cudnn_benchmark=True).arithmetic.apply()
    assert arithmetic_here() == {
        "deterministic": False,
        "float32_matmul_precision": "highest",
        "cudnn_benchmark": True,
        "cudnn_tf32": False,
    }


def test_a_users_own_process_gets_its_settings_back() -> None:
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.float64)
    before = arithmetic_here()
    with settings_given_back():
        settings(float32_matmul_precision="high", cudnn_benchmark=True).arithmetic.apply()
        assert torch.get_default_dtype() == torch.float32
        assert arithmetic_here() != before
    assert arithmetic_here() == before
    assert torch.get_default_dtype() == torch.float64


def test_precisions_that_a_task_sets_backend_by_backend_are_reported_and_set_back() -> None:
    Arithmetic().apply()
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError):  # torch has one name for all backends only where they agree
        torch.get_float32_matmul_precision()
    assert arithmetic_here()["float32_matmul_precision"] == "high"
    Arithmetic().apply()
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    assert arithmetic_here()["float32_matmul_precision"] == "highest"
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    assert arithmetic_here()["cudnn_tf32"]
    Arithmetic().apply()
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cudnn.allow_tf32


def test_a_workspace_that_the_user_has_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, ":16:8")
    Arithmetic(deterministic=True).apply()
    assert os.environ[WORKSPACE] == ":16:8"


def test_choosing_algorithms_by_their_time_is_refused_beside_determinism() -> None:
    with pytest.raises(ConfigError, match=r"train.cudnn_benchmark: chooses algorithms by their time"):
        settings(deterministic=True, cudnn_benchmark=True)


class Puts(nn.Linear):
    """A layer with an operation that has no deterministic form, on a CPU neither."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.clone().put_(torch.tensor([0]), torch.ones(1, dtype=inputs.dtype)))


class PutsTask(TinyTask):
    def build_model(self) -> nn.Module:
        return nn.Sequential(Puts(4, 2))


def test_an_operation_without_a_deterministic_form_ends_the_run_with_what_to_do() -> None:
    Arithmetic(deterministic=True).apply()
    with pytest.raises(
        TrainingError, match=r"put_ does not have .*train\.deterministic: true allows no such operation"
    ):
        train(PutsTask())
