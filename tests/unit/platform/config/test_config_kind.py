"""A command that is given a config of another kind says so in one sentence, and what to do with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.search.config.load import load_search_config
from orchestray.serving.config.load import load_serve_config
from orchestray.trainers.config.load import load_train_config

CONFIGS = Path(__file__).parents[4] / "configs"
TRAINING, SEARCH, ENDPOINT = (
    str(CONFIGS / place) for place in ("train/digits.yaml", "search/digits-bayesian.yaml", "serve/digits.yaml")
)


@pytest.mark.parametrize(
    ("load", "file", "kinds", "advice"),
    [
        (load_train_config, SEARCH, ("a search", "a training"), f"run it with: orchestray search {SEARCH}"),
        (load_train_config, ENDPOINT, ("an endpoint", "a training"), f"start it with: orchestray serve {ENDPOINT}"),
        (
            load_search_config,
            TRAINING,
            ("a training", "a search"),
            f"run it with: orchestray train {TRAINING}; or name it as the base of a search",
        ),
        (load_search_config, ENDPOINT, ("an endpoint", "a search"), f"start it with: orchestray serve {ENDPOINT}"),
        (
            load_serve_config,
            TRAINING,
            ("a training", "an endpoint"),
            f"what is served is its run: orchestray train {TRAINING}, then orchestray serve runs/digits",
        ),
        (
            load_serve_config,
            SEARCH,
            ("a search", "an endpoint"),
            f"what is served is its best run: orchestray search {SEARCH}, then orchestray serve runs/digits-bayesian",
        ),
    ],
)
def test_a_config_of_another_kind_is_one_problem_with_the_command_that_takes_it(
    load: Callable[[str], object], file: str, kinds: tuple[str, str], advice: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert caught.value.problems == (
        f"{file}: is the config of {kinds[0]}, and that of {kinds[1]} was wanted; {advice}",
    )


def test_the_base_of_a_search_must_be_the_config_of_a_training() -> None:
    with pytest.raises(ConfigError) as caught:
        load_search_config(SEARCH, [f"base={ENDPOINT}"])
    where, advice = f"{SEARCH}: base: {ENDPOINT}", f"start it with: orchestray serve {ENDPOINT}"
    assert caught.value.problems == (
        f"{where}: is the config of an endpoint, and that of a training was wanted; {advice}",
    )


def test_a_config_with_keys_of_two_kinds_is_left_to_the_schema_which_names_the_odd_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        load_train_config({"name": "a", "task": {"type": "digits"}, "models": []})
    assert {problem.split(": ")[1] for problem in caught.value.problems} == {"train", "models"}
