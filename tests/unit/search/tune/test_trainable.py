"""The training config of a Tune trial, by the values that Tune gives it; without Ray."""

from __future__ import annotations

from typing import Any

import pytest
from ray.tune.search import Repeater

from orchestray.platform.errors import ConfigError
from orchestray.search import trainable, tune_searcher
from orchestray.search.spaces.dimensions import make_dimension
from support.search_loop import base

Trained = trainable({**base(), "train": {**base()["train"], "steps": 3, "seed": 5}})


@pytest.mark.parametrize(
    ("nested", "dotted"),
    [
        ({"train": {"optimizer": {"lr": 0.3}}}, {"train.optimizer.lr": 0.3}),
        (
            {"train": {"optimizer.lr": 0.3, "seed": 1}},
            {"train.optimizer.lr": 0.3, "train.seed": 1},
        ),
        ({"train.optimizer": {"lr": 0.3}}, {"train.optimizer.lr": 0.3}),
        ({"train": {"optimizer": {"type": "adam", "lr": 0.3}}}, {"train.optimizer": {"type": "adam", "lr": 0.3}}),
        ({"train": {"lr_schedule": {"type": "cosine"}}}, {"train.lr_schedule": {"type": "cosine"}}),
        ({"strategy": {"network": {"data": 2}}}, {"strategy.network.data": 2}),
    ],
)
def test_nested_values_are_those_of_dotted_keys(nested: dict[str, Any], dotted: dict[str, Any]) -> None:
    made = Trained.trial_config(nested)
    assert made == Trained.trial_config(dotted)
    assert made != Trained.base


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"train": {"optimizer": {"rate": 0.3}}}, "train.optimizer.rate"),
        ({"train": {"optimizer": {"lr": 0.3}}, "train.optimizer.lr": 0.2}, "two values of train.optimizer.lr"),
        ({"tarin": {"steps": 3}}, "tarin"),
    ],
)
def test_nested_values_that_are_no_keys_or_say_one_twice_are_refused_by_name(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Trained.trial_config(values)


def test_whole_numbers_that_a_searcher_draws_as_floats_are_taken_where_the_key_is_whole() -> None:
    made = Trained.trial_config({"train.steps": 16.0, "train.optimizer.lr": 1.0, "train": {"seed": 2.0}})
    assert (made.train.steps, made.train.seed) == (16, 2)
    assert made == Trained.trial_config({"train.steps": 16, "train.optimizer.lr": 1, "train.seed": 2})
    with pytest.raises(ConfigError, match=r"train.steps: must be a whole number, got 16.5"):
        Trained.trial_config({"train.steps": 16.5, "train.seed": 2.0})


def test_trials_that_a_repeater_repeats_differ_by_their_seeds_alone() -> None:
    searcher = tune_searcher(
        "random", {"train.optimizer.lr": make_dimension("uniform", low=0.1, high=0.2)}, metric="loss", trials=2
    )
    repeated: Any = Repeater(searcher, repeat=3)
    made = [Trained.trial_config(repeated.suggest(f"trial-{index}")) for index in range(3)]
    assert [each.train.seed for each in made] == [5, 6, 7]
    assert made[0].train.optimizer == made[1].train.optimizer == made[2].train.optimizer
    assert Trained.trial_config({"train.seed": 8, "__trial_index__": 2}).train.seed == 10


def test_parameters_that_tune_would_give_each_trial_are_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"tune.with_parameters: .* takes no parameters, got data; give trainable\(\)"
    ):
        Trained({}).setup({}, data=[1.0])
