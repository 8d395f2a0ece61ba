"""Changes that a resumed run may make to its config."""

from __future__ import annotations

import pytest

from orchestray.trainers.config.faults import Distill
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.config.resume import resume_differences
from orchestray.trainers.config.schema import TrainConfig


def config(*overrides: str) -> TrainConfig:
    return load_train_config(
        {
            "name": "a",
            "task": {"type": "digits"},
            "train": {
                "batch_size": 8,
                "epochs": 3,
                "time_limit_s": 60,
                "optimizer": {"type": "sgd", "lr": 0.1},
            },
        },
        overrides,
    )


@pytest.mark.parametrize(
    "override",
    [
        "strategy.network.data=4",
        "strategy.exchange.overlap=false",
        "resources.cpus_per_worker=0.5",
        "resources.spares=1",
        "engine=ray_train",
        "checkpoint.every_steps=7",
        "checkpoint.storage=s3://bucket/x",
        "max_restarts=0",
        "allow_faults=true",
        "strategy.exchange={type: parameter_server, shards: 2}",
        "strategy={network: {data: 2}, exchange: {type: averaging, every: 2}, compression: {type: qsgd}}",
        "train.epochs=4",
        "train.time_limit_s=61",
        "train.time_limit_s=null",
    ],
)
def test_how_it_runs_and_for_how_long_may_change(override: str) -> None:
    assert resume_differences(config(), config(override)) == []


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("train.batch_size=9", "train.batch_size (was 8, now 9)"),
        ("train.seed=1", "train.seed (was 0, now 1)"),
        ("train.optimizer.lr=0.2", "train.optimizer.lr (was 0.1, now 0.2)"),
        ("task.hidden=[64]", "task.hidden (was [128, 128], now [64])"),
        ("name=b", "name (was 'a', now 'b')"),
        ("train.epochs=2", "train.epochs (was 3, now 2; it may only be raised)"),
        ("train.time_limit_s=59", "train.time_limit_s (was 60.0, now 59.0; it may only be raised)"),
    ],
)
def test_what_is_learned_may_not_change(override: str, difference: str) -> None:
    assert resume_differences(config(), config(override)) == [difference]


def test_every_key_that_differs_is_named_but_not_those_another_type_brings() -> None:
    new = config("train.optimizer={type: adagrad, lr: 0.1}", "train.until={metric: accuracy, value: 0.9}")
    assert resume_differences(config(), new) == [
        "train.optimizer.type (was 'sgd', now 'adagrad')",
        "train.until.metric (was null, now 'accuracy')",
        "train.until.value (was null, now 0.9)",
        "train.until.mode (was null, now 'max')",
    ]


def test_what_shall_go_wrong_may_change() -> None:
    broken = config("allow_faults=true", "faults=[{kill: worker/0, at_step: 2}]")
    assert resume_differences(config(), broken) == []
    assert resume_differences(broken, config()) == []


def test_a_run_cannot_get_lose_or_change_its_teacher() -> None:
    one, two = (config().model_copy(update={"distill": Distill(teacher=teacher)}) for teacher in ("/one", "/two"))
    assert resume_differences(config(), one) == [
        "distill.teacher (was null, now '/one')",
        "distill.temperature (was null, now 2.0)",
        "distill.weight (was null, now 0.5)",
    ]
    assert resume_differences(one, two) == ["distill.teacher (was '/one', now '/two')"]
    assert resume_differences(one, config())[0] == "distill.teacher (was '/one', now null)"


def test_epochs_cannot_turn_into_steps() -> None:
    assert resume_differences(config(), config("train.epochs=null", "train.steps=1000")) == [
        "train.epochs (was 3, now null; it may only be raised)",
        "train.steps (was null, now 1000; it may only be raised)",
    ]
