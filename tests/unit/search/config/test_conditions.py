"""Keys of a space that exist only under values of others; combinations that the rules of the base refuse."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from orchestray.platform.config import yaml_text
from orchestray.platform.errors import ConfigError
from orchestray.search.config.gangs import most_workers
from orchestray.search.config.load import dump_search_yaml, load_search_config
from orchestray.search.config.trial import trial_config
from orchestray.search.engine.resume import session_of
from orchestray.search.engine.session import MemoryJournal
from orchestray.search.registry.check import check_method, method_of
from support.search_configs import GOOD

TYPE, MOMENTUM = "train.optimizer.type", "train.optimizer.momentum"
OPTIMIZERS = {
    TYPE: {"type": "choice", "values": ["sgd", "adamw"]},
    MOMENTUM: {"type": "choice", "values": [0.1, 0.9]},
}


def config_of(space: dict[str, Any], *overrides: str, **search: Any) -> Any:
    source = copy.deepcopy(GOOD)
    source["search"] |= {"space": space, **search}
    return load_search_config(source, overrides)


def under(space: dict[str, Any], key: str, **when: Any) -> dict[str, Any]:
    """Return the space with conditions of a key; dots in names are written as two underscores."""
    named = {name.replace("__", "."): value for name, value in when.items()}
    return {**space, key: {**space[key], "when": named}}


def proposals_of(config: Any) -> list[dict[str, Any]]:
    session = session_of(config, MemoryJournal())
    found = []
    while (proposal := session.ask()) is not None:
        found.append(dict(proposal.changes))
    return found


def test_a_trial_has_a_conditional_key_only_where_it_exists_and_no_combination_is_refused() -> None:
    config = config_of(under(OPTIMIZERS, MOMENTUM, train__optimizer__type="sgd"), method={"type": "grid"})
    assert check_method(config) == []
    assert proposals_of(config) == [{TYPE: "sgd", MOMENTUM: 0.1}, {TYPE: "sgd", MOMENTUM: 0.9}, {TYPE: "adamw"}]
    for changes in proposals_of(config):
        assert trial_config(config, changes).train.optimizer.type == changes[TYPE]


def test_a_key_that_only_a_searched_type_has_exists_though_the_base_has_another_type() -> None:
    space = under(OPTIMIZERS, MOMENTUM, train__optimizer__type="sgd")
    adamw = "base.train.optimizer={type: adamw, lr: 0.01}"
    assert proposals_of(config_of(space, adamw, method={"type": "grid"})) == [
        {TYPE: "sgd", MOMENTUM: 0.1},
        {TYPE: "sgd", MOMENTUM: 0.9},
        {TYPE: "adamw"},
    ]
    with pytest.raises(ConfigError, match=r"momentum: is no key of the base config"):
        config_of({MOMENTUM: OPTIMIZERS[MOMENTUM]}, adamw)


def test_conditions_are_written_and_read_and_set_on_the_command_line() -> None:
    config = config_of(OPTIMIZERS, f"search.space.{MOMENTUM}.when.{TYPE}=[sgd]")
    assert config.search.space[MOMENTUM].when == {TYPE: ["sgd"]}
    whole = config_of(OPTIMIZERS, f"search.space.{MOMENTUM}.when={{{TYPE}: [sgd]}}")
    assert whole.search.space[MOMENTUM].when == config.search.space[MOMENTUM].when
    assert load_search_config(yaml_text.read(dump_search_yaml(config))) == config


@pytest.mark.parametrize(
    ("when", "problem"),
    [
        ({"train__optimizer__typ": "sgd"}, "typ: is no key of the space or the base config; did you mean"),
        ({"train__optimizer__type": "lion"}, "type: must be one of 'sgd', 'adamw', got 'lion', which is what"),
        ({"train__optimizer__type": []}, "type: must have one value or more"),
        ({"train__batch_size": 31}, "batch_size: never holds: the base has "),
        ({"train__optimizer__momentum": 0.1}, "goes round in a circle: train.optimizer.momentum -> train.optimizer."),
    ],
)
def test_a_condition_that_cannot_be_is_one_problem(when: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config_of(under(OPTIMIZERS, MOMENTUM, **when))
    assert len(raised.value.problems) == 1
    assert f"search.space.{MOMENTUM}.when" in raised.value.problems[0]
    assert problem in raised.value.problems[0]


def test_a_condition_on_the_base_holds_for_all_trials() -> None:
    batch_size = config_of(OPTIMIZERS).base.train.batch_size
    config = config_of(under(OPTIMIZERS, MOMENTUM, train__batch_size=[batch_size, 7]), method={"type": "grid"})
    assert all(MOMENTUM in changes for changes in proposals_of(config) if changes[TYPE] == "sgd")


def test_combinations_that_are_refused_are_shown_with_a_condition_that_helps_and_are_not_proposed() -> None:
    config = config_of(OPTIMIZERS, method={"type": "grid"})
    (caution,) = check_method(config)
    for part in (
        "refuse 2 of 4 combinations",
        f"{TYPE}: 'adamw'",
        "is no key of adamw",
        f"never tried: {TYPE}: 'adamw'. ",
        f"when: {{{TYPE}: ['sgd']}}",
    ):
        assert part in caution
    assert proposals_of(config) == [{TYPE: "sgd", MOMENTUM: 0.1}, {TYPE: "sgd", MOMENTUM: 0.9}]
    helped = config_of(under(OPTIMIZERS, MOMENTUM, train__optimizer__type=["sgd"]))
    assert check_method(helped) == []


def test_a_value_that_another_of_the_base_refuses_is_shown_with_a_condition_as_well() -> None:
    space = {
        "strategy.network.data": {"type": "choice", "values": [1, 2]},
        "strategy.exchange.type": {"type": "choice", "values": ["allreduce", "gossip"]},
    }
    (caution,) = check_method(config_of(space))
    assert "refuse 1 of 4" in caution
    assert "never tried" not in caution
    assert "when: {strategy.network.data: [2]}" in caution


def test_a_space_without_a_combination_that_can_be_trained_is_refused() -> None:
    one = {key: {"type": "choice", "values": [value]} for key, value in (("data", 1), ("type", "gossip"))}
    space = {"strategy.network.data": one["data"], "strategy.exchange.type": one["type"]}
    with pytest.raises(ConfigError, match=r"search\.space: no combination of its values can be trained"):
        check_method(config_of(space, "base.strategy.network.data=2"))


@pytest.mark.parametrize("method", [{"type": "random"}, {"type": "bayesian"}, {"type": "asha", "grace_steps": 1}])
def test_left_out_combinations_are_the_same_however_often_the_search_goes_on(method: dict[str, Any]) -> None:
    space = OPTIMIZERS | {"train.optimizer.lr": {"type": "log_uniform", "low": 0.01, "high": 1.0}}
    config = config_of(space, method=method, budget={"trials": 12, "steps_per_trial": 20})
    journal = MemoryJournal()
    session = session_of(config, journal)
    before = [session.ask() for _ in range(3)]
    again = session_of(config, MemoryJournal(json.loads(json.dumps(journal.entries()))))
    assert [standing.proposal for standing in again.trials.values()] == before
    assert again.ask() == session.ask()
    assert all(proposal is not None and proposal.changes[TYPE] == "sgd" for proposal in before)


def test_the_workers_of_a_layout_that_exists_under_another_key_are_counted() -> None:
    space = {
        "strategy.network.data": {"type": "choice", "values": [2, 4]},
        "strategy.exchange.type": {"type": "choice", "values": ["allreduce", "gossip"]},
    }
    config = config_of(under(space, "strategy.network.data", strategy__exchange__type="gossip"))
    assert most_workers(config.base, config.search.space) == 4


def test_an_item_of_a_longer_list_is_searched_where_the_list_has_it() -> None:
    space = {
        "task.hidden": {"type": "choice", "values": [[8], [8, 8]]},
        "task.hidden.1": {"type": "choice", "values": [16, 32], "when": {"task.hidden": [[8, 8]]}},
    }
    config = config_of(space, method={"type": "grid"})
    assert check_method(config) == []
    made = [trial_config(config, changes).task.arguments["hidden"] for changes in proposals_of(config)]
    assert made == [[8], [8, 16], [8, 32]]


def test_a_large_space_is_tried_by_chance_and_checked_at_each_proposal() -> None:
    keys = ("dropout", "validation_fraction")
    ranges = {f"task.{key}": {"type": "choice", "values": [0.1, 0.2, 0.3, 0.4]} for key in keys}
    space = OPTIMIZERS | ranges | {"train.seed": {"type": "choice", "values": list(range(9))}}
    config = config_of(space, budget={"trials": 20, "steps_per_trial": 20})
    (caution,) = check_method(config)
    assert "of 256 combinations that were tried" in caution
    method = method_of(config)
    assert all(changes[TYPE] == "sgd" for changes in proposals_of(config))
    assert method.space.num_points is None
