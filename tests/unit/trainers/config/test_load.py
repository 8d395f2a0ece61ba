"""Loading: where values come from, where paths lead, and that what is written is what is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestray.trainers.config.load import dump_yaml, load_train_config
from orchestray.trainers.config.schema import TrainConfig

GOOD: dict[str, Any] = {
    "name": "a",
    "task": {"type": "digits"},
    "train": {"batch_size": 8, "steps": 3, "optimizer": {"type": "sgd", "lr": 0.1}},
}


def test_defaults_are_those_of_the_documented_format() -> None:
    config = load_train_config(GOOD)
    assert config.model_dump(mode="json") == {
        "name": "a",
        "task": {
            "type": "digits",
            "hidden": [128, 128],
            "model": "mlp",
            "batch_norm": False,
            "dropout": 0.0,
            "validation_fraction": 0.2,
        },
        "train": {
            "batch_size": 8,
            "batch_schedule": None,
            "noise_scale": None,
            "drop_last": False,
            "init": None,
            "init_gain": 1.0,
            "init_from": None,
            "init_except": [],
            "freeze": [],
            "weight_norm": False,
            "init_keeps": None,
            "epochs": None,
            "steps": 3,
            "until": None,
            "early_stopping": None,
            "time_limit_s": None,
            "optimizer": {
                "type": "sgd",
                "groups": [],
                "lr": 0.1,
                "momentum": 0.0,
                "nesterov": False,
                "weight_decay": 0.0,
            },
            "solver": None,
            "average": None,
            "lr_schedule": {"type": "constant", "warmup_steps": 0},
            "lr_scaling": None,
            "precision": "float32",
            "float32_matmul_precision": "highest",
            "deterministic": False,
            "cudnn_benchmark": False,
            "quantize": None,
            "ensemble": None,
            "accumulate": 1,
            "seed": 0,
            "batch_norm": "synchronized",
            "buffers": None,
            "recompute": "none",
            "grad_clip": None,
            "validate_every_steps": None,
            "loss_is": "mean",
        },
        "strategy": {
            "network": {
                "data": 1,
                "tensor": 1,
                "pipeline": 1,
                "schedule": "1f1b",
                "microbatches": None,
                "stages_per_worker": None,
                "split": "balanced",
                "vertical_sync": False,
                "plan": "auto",
            },
            "exchange": {
                "type": "allreduce",
                "algorithm": "native",
                "shard": "none",
                "bucket_mb": 25.0,
                "overlap": True,
                "factors": "never",
                "store_shards": 0,
            },
            "compression": {"type": "none"},
            "aggregation": {"type": "mean"},
        },
        "checkpoint": {"every_steps": 100, "keep": 2, "best": None, "storage": None},
        "resources": {"cpus_per_worker": 1.0, "gpus_per_worker": 0.0, "peak_tflops": None, "spares": 0},
        "engine": "actors",
        "max_restarts": 3,
        "hang_timeout_s": 60.0,
        "report_hang_s": 60.0,
        "stall_timeout_s": 600.0,
        "trackers": [],
        "distill": None,
        "allow_faults": False,
        "faults": [],
    }


def test_overrides_and_name_are_applied_after_loading_and_leave_the_source_alone() -> None:
    source = {**GOOD, "train": {**GOOD["train"], "optimizer": {"type": "sgd", "lr": 0.1}}}
    config = load_train_config(
        source,
        [
            "train.optimizer={type: adam, lr: 1e-3}",
            "task.hidden=[4, 4]",
            "task.hidden.1=8",
            "strategy.network.data=2",
            "train.steps=null",
            "train.epochs=2",
            "checkpoint.storage=s3://bucket/a=b",
        ],
        name="other",
    )
    assert config.name == "other"
    assert (config.train.optimizer.type, config.train.optimizer.lr) == ("adam", 0.001)
    assert config.task.arguments["hidden"] == [4, 8]
    assert config.strategy.network.data == 2
    assert (config.train.steps, config.train.epochs) == (None, 2)
    assert config.checkpoint.storage == "s3://bucket/a=b"
    assert source["name"] == "a"
    assert source["train"]["optimizer"] == {"type": "sgd", "lr": 0.1}


@pytest.mark.parametrize("text", ["1e-3", "1.0e-3", "1E-3", ".001", "0.001"])
def test_a_number_is_a_number_however_it_is_written(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        f"name: a\ntask: {{type: digits}}\ntrain: {{batch_size: 8, steps: 3, optimizer: {{type: sgd, lr: {text}}}}}\n"
    )
    assert load_train_config(file).train.optimizer.lr == 0.001


@pytest.mark.parametrize(
    ("metric", "mode", "resolved"),
    [
        ("accuracy", None, "max"),
        ("loss", None, "min"),
        ("mean_squared_error", None, "min"),
        ("loss", "max", "max"),
        ("lossless", "max", "max"),
        ("neg_mean_squared_error", None, "max"),
    ],
)
def test_the_direction_of_a_goal_follows_from_its_metric(metric: str, mode: str | None, resolved: str) -> None:
    goal = {"metric": metric, "value": 1, "mode": mode}
    # Of a task that this look cannot know the metrics of.
    source = {**GOOD, "task": {"type": "package.module:Mine"}, "train": {**GOOD["train"], "until": goal}}
    until = load_train_config(source).train.until
    assert until is not None
    assert until.mode == resolved


def test_paths_in_a_file_are_relative_to_it_and_paths_in_overrides_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    file = tmp_path / "configs" / "c.yaml"
    file.write_text(
        "name: a\ntask: {type: parquet, path: ../data/x.parquet, label: y, validation_path: s3://b/v}\n"
        "train: {batch_size: 8, steps: 3, optimizer: {type: sgd, lr: 1}}\ncheckpoint: {storage: ckpt}\n"
    )
    monkeypatch.chdir(tmp_path)
    config = load_train_config("configs/c.yaml")
    assert config.task.arguments["path"] == str(tmp_path / "data" / "x.parquet")
    assert config.task.arguments["validation_path"] == "s3://b/v"
    assert config.checkpoint.storage == str(tmp_path / "configs" / "ckpt")
    config = load_train_config("configs/c.yaml", ["task.path=mine.parquet", "checkpoint={storage: gs://b/c}"])
    assert config.task.arguments["path"] == str(tmp_path / "mine.parquet")
    assert config.checkpoint.storage == "gs://b/c"


def test_home_is_expanded_in_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    config = load_train_config({**GOOD, "checkpoint": {"storage": "~/checkpoints"}})
    assert config.checkpoint.storage == "/home/someone/checkpoints"


def test_a_config_loads_as_itself() -> None:
    config = load_train_config(GOOD, ["strategy.network.data=2"])
    assert load_train_config(config) == config


def test_one_column_may_be_named_without_a_list() -> None:
    task = {"type": "parquet", "path": "/x", "label": "y", "features": "a"}
    assert load_train_config({**GOOD, "task": task}).task.arguments["features"] == ["a"]


def test_a_frozen_config_cannot_be_changed() -> None:
    config = load_train_config(GOOD)
    with pytest.raises(ValueError, match="frozen"):
        config.train.batch_size = 3  # type: ignore[misc]


_TEXT = st.text(min_size=1, max_size=20)
_SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | _TEXT
_DATA = st.recursive(_SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3))


@settings(deadline=None, max_examples=40)
@given(arguments=st.dictionaries(_TEXT.filter(lambda key: key not in {"type", "path"} and "path" not in key), _DATA))
def test_what_is_dumped_loads_as_the_same_config_whatever_a_task_takes(arguments: dict[str, Any]) -> None:
    config = load_train_config({**GOOD, "task": {"type": "package.module:Mine", **arguments}})
    assert config.task.arguments == arguments
    assert load_train_config_text(dump_yaml(config)) == config


@settings(deadline=None, max_examples=40)
@given(
    lr=st.floats(min_value=1e-300, max_value=1e300),
    momentum=st.floats(min_value=0, max_value=2),
    bucket_mb=st.floats(min_value=1e-9, max_value=1e9),
    kind=st.sampled_from(["sgd", "rmsprop", "lars"]),
)
def test_no_digit_of_a_number_is_lost_in_a_dump(lr: float, momentum: float, bucket_mb: float, kind: str) -> None:
    config = load_train_config(
        {
            **GOOD,
            "train": {**GOOD["train"], "optimizer": {"type": kind, "lr": lr, "momentum": momentum}},
            "strategy": {"exchange": {"bucket_mb": bucket_mb}},
        }
    )
    assert load_train_config_text(dump_yaml(config)) == config


def load_train_config_text(text: str) -> TrainConfig:
    from orchestray.platform.config import yaml_text

    return load_train_config(yaml_text.read(text))


def test_every_key_of_the_schema_has_a_description() -> None:
    schema = TrainConfig.model_json_schema()
    undescribed = [
        f"{name}.{key}"
        for name, section in {"TrainConfig": schema, **schema["$defs"]}.items()
        for key, entry in section["properties"].items()
        if not (entry.get("description") or schema["$defs"][entry["$ref"].rpartition("/")[2]].get("description"))
    ]
    assert undescribed == []


def test_a_run_without_a_name_has_that_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "my digits.yaml"
    file.write_text("task: {type: digits}\ntrain: {batch_size: 64, epochs: 1, optimizer: {type: sgd, lr: 0.1}}\n")
    assert load_train_config(file).name == "my-digits"
    assert load_train_config(file, ["name=other"]).name == "other"
    assert load_train_config(file, name="given").name == "given"
    plain = {
        "task": {"type": "digits"},
        "train": {"batch_size": 8, "epochs": 1, "optimizer": {"type": "sgd", "lr": 1.0}},
    }
    assert load_train_config(plain).name == "run"
