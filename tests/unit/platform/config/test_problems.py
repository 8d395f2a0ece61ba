"""Messages to a user whose config is wrong: exact texts, every problem at once, one a line."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from support.configs import GOOD, problems_of


@pytest.mark.parametrize(
    ("override", "line"),
    [
        # unknown keys
        ("train.optimzer=1", "train.optimzer: is no known key; did you mean 'optimizer'?"),
        ("task.hiden=[1]", "task.hiden: is no known key; did you mean 'hidden'?"),
        ("train.optimizer.momentun=0.9", "train.optimizer.momentun: is no known key; did you mean 'momentum'?"),
        (
            "resources.x=1",
            "resources.x: is no known key; known here: cpus_per_worker, gpus_per_worker, peak_tflops, spares",
        ),
        # wrong types: nothing is bent into shape
        ("train.batch_size=true", "train.batch_size: must be a whole number, got true"),
        ("train.batch_size=8.0", "train.batch_size: must be a whole number, got 8.0"),
        ("train.batch_size=eight", "train.batch_size: must be a whole number, got 'eight'"),
        (
            "train.batch_size='8'",
            "train.batch_size: must be a whole number, got '8' (take it out of its quotes)",
        ),
        ("train.batch_size=", "train.batch_size: must be a whole number, got null"),
        ("train.optimizer.lr=true", "train.optimizer.lr: must be a number, got true"),
        ("train.optimizer.lr=.nan", "train.optimizer.lr: must be a finite number, got NaN"),
        ("train.optimizer.lr=nan", "train.optimizer.lr: must be a number, got 'nan'"),
        ("train.optimizer.nesterov=1", "train.optimizer.nesterov: must be true or false, got 1"),
        ("train.optimizer.nesterov=yes", "train.optimizer.nesterov: must be true or false, got 'yes'"),
        ("name=2024", "name: must be text, got 2024 (put it in quotes)"),
        ("task.hidden=128", "task.hidden: must be a list, got 128"),
        ("task.hidden=[8, x]", "task.hidden.1: must be a whole number, got 'x'"),
        ("train=3", "train: must be a mapping of keys to values, got 3"),
        ("strategy.network=[1]", "strategy.network: must be a mapping of keys to values, got [1]"),
        # out of range
        ("train.batch_size=0", "train.batch_size: must be >= 1, got 0"),
        ("train.seed=-1", "train.seed: must be >= 0, got -1"),
        (
            "train.seed=18446744073709551616",  # more than torch's generators take
            "train.seed: must be <= 18446744073709551615, got 18446744073709551616",
        ),
        ("train.optimizer.lr=0", "train.optimizer.lr: must be > 0, got 0"),
        ("task.dropout=1", "task.dropout: must be < 1, got 1"),
        ("train.steps=-5", "train.steps: must be >= 1, got -5"),
        ("resources.gpus_per_worker=-1", "resources.gpus_per_worker: must be >= 0, got -1"),
        (
            "resources.gpus_per_worker=1.5",
            (
                "resources.gpus_per_worker: is 1.5: Ray divides one GPU, and gives several only whole; "
                "use a whole number, or less than 1"
            ),
        ),
        ("train.precision=float16", None),
        # names
        (
            "name=a/b",
            "name: must be letters, digits, '.', '_' and '-', starting with a letter or a digit, got 'a/b'",
        ),
        (
            "engine=actor",
            "engine: must be one of actors, ray_train, got 'actor'; did you mean 'actors'?",
        ),
        (
            "train.optimizer.type=adm",
            (
                "train.optimizer.type: must be one of sgd, adagrad, rmsprop, adam, adamw, lars, lamb, kfac, "
                "natural_gradient, muon, soap, yellowfin, got 'adm'; "
                "did you mean 'adam'?"
            ),
        ),
        (
            "train.optimizer.type=torch.optim.NAdam",
            (
                "train.optimizer.type: must be one of sgd, adagrad, rmsprop, adam, adamw, lars, lamb, kfac, "
                "natural_gradient, muon, soap, yellowfin, got 'torch.optim.NAdam'; "
                "a class is written with a colon: 'torch.optim:NAdam'"
            ),
        ),
        (
            "train.optimizer={lr: 1}",
            (
                "train.optimizer.type: is required, and missing; there are sgd, adagrad, rmsprop, adam, adamw, lars, "
                "lamb, kfac, natural_gradient, muon, soap, yellowfin"
            ),
        ),
        (
            "task.type=digts",
            (
                "task.type: there is no task 'digts'; did you mean 'digits'? (built in are digits, huggingface, "
                'images, mnist, parquet, python_source; your own is "path/to/file.py:Class" or "module:Class")'
            ),
        ),
        ("train.until.metric=accuracy", "train.until.value: is required, and missing"),
        # keys that have one of several forms
        (
            "strategy.network.split=ballanced",
            (
                "strategy.network.split: must be one of balanced, equal or a list, got 'ballanced'; "
                "did you mean 'balanced'?"
            ),
        ),
        ("strategy.network.split=[a, 1]", "strategy.network.split.1: must be text, got 1 (put it in quotes)"),
        ("train.optimizer={type: adam, lr: 1, betas: [0.9]}", "train.optimizer.betas: must be a list of 2, got [0.9]"),
        ("train.optimizer={type: adam, lr: 1, betas: []}", "train.optimizer.betas: must be a list of 2, got []"),
        ("train.optimizer={type: sgd, llr: 1}", "train.optimizer.llr: is no known key; did you mean 'lr'?"),
        # keys of another type
        (
            "train.optimizer.betas=[0.9, 0.9]",
            "train.optimizer.betas: is no key of sgd; adam, adamw, lamb, muon, soap have it",
        ),
        ("task.width=8", "task.width: is no key of digits; python_source has it"),
        # what is put on the wire, and how it is combined
        (
            "strategy.network.microbatches=3",
            "strategy.network.microbatches: must divide train.batch_size (8) evenly, got 3; 2, 4 would fit",
        ),
        (
            "strategy.network={pipeline: 2, schedule: zbv, stages_per_worker: 1}",
            "strategy.network.stages_per_worker: the schedule zbv has 2 stage(s) a worker, got 1",
        ),
        (
            "strategy.network={pipeline: 2, schedule: gpipe, stages_per_worker: 2}",
            "strategy.network.stages_per_worker: the schedule gpipe has 1 stage(s) a worker, got 2",
        ),
        (
            "strategy.network={pipeline: 4, schedule: interleaved_1f1b, microbatches: 2}",
            (
                "strategy.network.microbatches: the schedule interleaved_1f1b sends micro-batches in rounds of one a "
                "worker: give a multiple of pipeline (4), got 2"
            ),
        ),
        (
            "strategy.network.plan=spatial",
            (
                "strategy.network.plan: says what `tensor` workers split; with tensor: 1 there is nothing to split, "
                "got plan: spatial"
            ),
        ),
        (
            "strategy.exchange.shard=parameters",
            (
                "strategy.exchange.shard: spreads the parameters over the replicas; with data: 1 there is one. "
                "Raise strategy.network.data"
            ),
        ),
        # rules between keys
        (
            "train.epochs=3",
            "train.steps: give either epochs or steps, not both (on the command line, train.epochs=null drops epochs)",
        ),
        ("train.steps=null", "train.epochs: is required, and missing: give either epochs or steps"),
        (
            "train.accumulate=9",
            "train.accumulate: cannot split a batch of 8 (train.batch_size) into 9 micro-batches",
        ),
        (
            "train.optimizer.nesterov=true",
            "train.optimizer.nesterov: needs a momentum: without one there is nothing to look ahead by",
        ),
        (
            "train.lr_schedule={type: cosine, warmup_steps: 5, total_steps: 5}",
            "train.lr_schedule.total_steps: must be more than warmup_steps (5), got 5",
        ),
        (
            "checkpoint.storage=ftp://host/x",
            (
                "checkpoint.storage: has no scheme that pyarrow.fs knows (abfs, abfss, file, gcs, gs, hdfs, s3, "
                "viewfs), got 'ftp://'"
            ),
        ),
        # overrides themselves
        ("train.steps", "'train.steps' is no override; one looks like train.epochs=3"),
        ("train..steps=3", "'train..steps=3' is no override; one looks like train.epochs=3"),
        (
            "train.steps=[1",
            "train.steps: the value '[1' cannot be read: line 1, column 3: expected ',' or ']', but got '<stream end>'",
        ),
        ("name.first=x", "name.first: cannot be set: name holds no keys"),
    ],
)
def test_one_mistake_gives_one_line(override: str, line: str | None) -> None:
    line = line or (
        "train.precision: must be one of float32, bfloat16, float64, got 'float16'; did you mean 'bfloat16'?"
    )
    assert problems_of(GOOD, override) == [f"config: {line}"]


@pytest.mark.parametrize(
    ("task", "lines"),
    [
        ({"type": "parquet"}, ["task.path: is required, and missing", "task.label: is required, and missing"]),
        (
            {"type": "python_source", "width": 10, "heads": 4},
            ["task.heads: must divide width (10) evenly, got 4"],
        ),
        (
            {"type": "parquet", "path": "x", "label": "y", "features": ["x", "y"]},
            ["task.features: holds the label 'y': the network would be told what to predict"],
        ),
        (
            {"type": "parquet", "path": "x", "label": "y", "features": []},
            ["task.features: is an empty list; name a column, or leave it null for all numeric columns"],
        ),
        (
            {"type": "parquet", "path": "x", "label": "y", "kind": "regression", "num_classes": 3},
            ["task.num_classes: has no meaning for kind: regression; take it out"],
        ),
        ({"hidden": [1]}, ["task.type: is required, and missing"]),
        (3, ["task: must be a mapping of keys to values, got 3"]),
        (
            {"type": "my task:Class"},
            ['task.type: must be "path/to/file.py:Class" or "package.module:Class", got \'my task:Class\''],
        ),
        (
            {"type": "module:"},
            ["task.type: must end with the name of a class after the colon, got 'module:'"],
        ),
    ],
)
def test_what_is_wrong_with_a_task_is_said(task: Any, lines: list[str]) -> None:
    assert problems_of({**GOOD, "task": task}) == [f"config: {line}" for line in lines]


def test_spares_are_refused_where_nothing_can_use_them() -> None:
    assert problems_of(GOOD, "engine=ray_train", "resources.spares=1") == [
        (
            "config: resources.spares: engine: ray_train keeps no spares, it restarts all its workers; "
            "use engine: actors, or spares: 0"
        )
    ]


def test_every_problem_is_reported_at_once_even_those_between_keys(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(
        dedent(
            """
            name: bad name
            surprise: 1
            task: {type: my.py:Mine}
            train:
              batch_size: many
              optimizer: {type: sgd, lr: 0.1, nesterov: true}
              seed: -1
            strategy: {network: {data: 2, vertical_sync: true}}
            """
        )
    )
    assert problems_of(file, "train.grad_clip", "train.accumulate=-3") == [
        f"{file}: {line}"
        for line in [
            "'train.grad_clip' is no override; one looks like train.epochs=3",
            "name: must be letters, digits, '.', '_' and '-', starting with a letter or a digit, got 'bad name'",
            "train.batch_size: must be a whole number, got 'many'",
            "train.accumulate: must be >= 1, got -3",
            "train.seed: must be >= 0, got -1",
            (
                "surprise: is no known key; known here: allow_faults, checkpoint, distill, engine, faults, "
                "hang_timeout_s, max_restarts, name, report_hang_s, resources, stall_timeout_s, strategy, task, "
                "trackers, train"
            ),
            f"task.type: there is no file {tmp_path / 'my.py'}",
            "train.epochs: is required, and missing: give either epochs or steps",
            "train.optimizer.nesterov: needs a momentum: without one there is nothing to look ahead by",
            "strategy.network.vertical_sync: has a meaning with schedule: pipedream and a pipeline only",
        ]
    ]


def test_a_rule_between_keys_is_silent_where_one_of_them_has_a_problem_itself() -> None:
    assert problems_of(GOOD, "train.epochs='3'") == [
        "config: train.epochs: must be a whole number, got '3' (take it out of its quotes)"
    ]


def test_an_empty_mapping_lacks_all_that_is_required() -> None:
    assert problems_of({}) == [
        "config: task: is required, and missing",
        "config: train: is required, and missing",
    ]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "must hold keys and values, is empty"),
        (b"- 1\n- 2\n", "must hold keys and values, and does not"),
        (b"name: a\ntrain: [1,\n", "line 3, column 1: expected the node content, but found '<stream end>'"),
        (b"name: a\nname: b\n", "line 2, column 1: the key 'name' is there twice"),
        (b"name: a: b\n", "line 1, column 8: mapping values are not allowed here"),
        (b"\xff\xfe\x00", "is no text in UTF-8, so no YAML"),
    ],
)
def test_a_file_that_is_no_config_is_said_with_the_place(tmp_path: Path, content: bytes, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(content)
    assert problems_of(file) == [f"{file}: {text}"]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert problems_of(tmp_path / "no.yaml") == [f"{tmp_path / 'no.yaml'}: there is no such file"]
    assert problems_of(tmp_path) == [f"{tmp_path}: cannot be read: Is a directory"]


def test_of_a_run_directory_the_config_in_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: a\n")
    hint = f"there is a config in it, {tmp_path / 'config.yaml'}"
    assert problems_of(tmp_path) == [f"{tmp_path}: cannot be read: Is a directory; {hint}"]


def test_a_key_that_is_no_text_is_a_problem_not_a_crash() -> None:
    assert problems_of({**GOOD, 1: 2}) == ["config: 1: must be a key of text, got 1"]
