"""Messages to a user about impossible members of an ensemble, and about unknown keys of a pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from orchestray.platform.config.yaml_text import read
from orchestray.trainers.config.load import dump_yaml, load_train_config
from orchestray.trainers.config.members import member_config
from support.configs import GOOD, problems_of

TWO = {**GOOD, "strategy": {"network": {"data": 2}, "exchange": {"type": "independent"}}}
_SAME = "is the same for all members, who train in step and are validated together; a member may have its own "
_OWN = "train.optimizer, train.lr_schedule, train.grad_clip, train.seed and arguments of the task"


def members(text: str) -> str:
    return f"strategy.exchange.members={text}"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            "[{train.optimizer.lr: 0.05}]",
            (
                ": must have 2 entries, one for each member (strategy.network.data), got 1; an entry without keys, {}, "
                "is a member as the rest of the config has it"
            ),
        ),
        ("[{}, {train.batch_size: 3}]", f".1.train.batch_size: {_SAME}{_OWN}"),
        ("[{}, {train: {optimizer: {lr: 2}}}]", f".1.train: {_SAME}{_OWN}"),
        ("[{}, {strategy.network.data: 3}]", f".1.strategy.network.data: {_SAME}{_OWN}"),
        (
            "[{task.validation_fraction: 0.3}, {}]",
            (
                ".0.task.validation_fraction: makes the data, which all members see; a member may have its own hidden, "
                "model, batch_norm, dropout"
            ),
        ),
        (
            "[{task.hiden: [3]}, {}]",
            (
                ".0.task.hiden: is no argument of digits; did you mean 'hidden'?; a member may have its own hidden, "
                "model, batch_norm, dropout"
            ),
        ),
        (
            "[{task.type: parquet}, {}]",
            ".0.task.type: the members learn the same task; give it arguments of a member's own instead",
        ),
        ("[{}, {train.optimizer.lr: -1}]", ".1.train.optimizer.lr: must be > 0, got -1"),
        ("[{}, {train.optimizer.lrr: 1}]", ".1.train.optimizer.lrr: is no known key; did you mean 'lr'?"),
        (
            "[{}, {train.optimizer.lr.x: 1}]",
            ".1.train.optimizer.lr.x: cannot be set: train.optimizer.lr holds no keys",
        ),
        (
            "[{}, {train.optimizer.nesterov: true}]",
            ".1.train.optimizer.nesterov: needs a momentum: without one there is nothing to look ahead by",
        ),
        ("[{}, 3]", ".1: must be a mapping of keys to values, got 3"),
    ],
)
def test_a_member_that_cannot_differ_so_gives_one_line(given: str, line: str) -> None:
    assert problems_of(TWO, members(given)) == [f"config: strategy.exchange.members{line}"]


def test_members_with_a_trunk_may_differ_by_seed_alone() -> None:
    own = members("[{train.seed: 4}, {train.optimizer.lr: 2.0}]")
    assert problems_of(TWO, "strategy.exchange.trunk=1", own) == [
        (
            "config: strategy.exchange.members.1.train.optimizer.lr: members with a trunk take the same steps with "
            "their first layers; use trunk: 0, or let them differ by train.seed alone"
        )
    ]


def test_what_is_wrong_with_all_members_is_said_once() -> None:
    own = members("[{train.optimizer.lr: 2.0}, {train.seed: 3}]")
    assert problems_of(TWO, "train.optimizer.nesterov=true", own) == [
        "config: train.optimizer.nesterov: needs a momentum: without one there is nothing to look ahead by"
    ]


def test_each_members_config_is_the_rest_with_its_own_keys() -> None:
    config = load_train_config(TWO, [members("[{train.optimizer: {type: adam, lr: 0.5}}, {task.hidden.0: 7}]")])
    first, second = (member_config(config, index) for index in range(2))
    assert (first.train.optimizer.type, first.train.optimizer.lr) == ("adam", 0.5)
    assert first.task == config.task
    assert second.train == config.train
    assert second.task.arguments["hidden"] == [7, 128]
    assert load_train_config(read(dump_yaml(config))) == config


@pytest.mark.parametrize(
    ("key", "value"), [("schedule", "gpipe"), ("schedule", "pipedream"), ("stages_per_worker", 2), ("split", ["2"])]
)
def test_keys_of_a_pipeline_without_one_are_refused(key: str, value: Any) -> None:
    shown = value if isinstance(value, int) else repr(value) if isinstance(value, str) else '["2"]'
    assert problems_of({**GOOD, "strategy": {"network": {key: value}}}) == [
        (
            f"config: strategy.network.{key}: is for a pipeline, and with pipeline: 1 there is none; got {shown}; "
            "raise strategy.network.pipeline, or take it out"
        )
    ]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_key_of_a_member_counts_in_a_section_of_the_member_in_whatever_order(is_first: bool) -> None:
    changes = {"train.optimizer.lr": 0.5, "train.optimizer": {"type": "sgd", "lr": 0.1}}
    member = dict(sorted(changes.items(), reverse=is_first))
    strategy = {**TWO["strategy"], "exchange": {"type": "independent", "members": [member, {}]}}
    config = load_train_config({**TWO, "strategy": strategy})
    assert member_config(config, 0).train.optimizer.lr == 0.5
