"""Programs that obey some keys of `train` refuse the others, and no key that they obey."""

from __future__ import annotations

from dataclasses import fields

from orchestray.trainers.config.obeyed import not_obeyed
from orchestray.trainers.config.schema import TrainSection
from orchestray.trainers.core.arithmetic import Arithmetic


def test_every_program_obeys_the_keys_of_its_arithmetic_and_names_each_other_key_that_is_set() -> None:
    arithmetic = {"deterministic": True, "float32_matmul_precision": "high", "cudnn_benchmark": True}
    assert set(arithmetic) == {field.name for field in fields(Arithmetic)}
    train = TrainSection.model_validate({"batch_size": 8, "epochs": 1, "accumulate": 2, "freeze": ["a"], **arithmetic})
    found = not_obeyed(train, {"batch_size", "epochs"}, {"freeze": "nothing is frozen"}, "is not there")
    assert found == ["train.freeze: nothing is frozen", "train.accumulate: is not there"]
