"""Callbacks of Ray Tune by their names; what is none is refused with a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestray.cli.validate import validate
from orchestray.platform.errors import ConfigError
from orchestray.search.api import search
from orchestray.search.config.schema import CallbackSection
from orchestray.search.engine.callbacks import blame, check_callbacks, make_callbacks
from support.search_configs import GOOD

OWN = """
from ray.tune import Callback

class Mine(Callback):
    def on_trial_result(self, iteration, trials, trial, result, **info):
        pass

class Given(Callback):
    def __init__(self, project="", tags=None):
        self.project, self.tags = project, tags

    def on_trial_result(self, iteration, trials, trial, result, **info):
        result["loss"]

class Needs(Callback):
    def __init__(self, server):
        raise AssertionError("made")

class Other:
    pass

class Failing(Callback):
    def __init__(self):
        raise ValueError("no server")
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_callbacks_of_a_module_and_of_a_file_are_made(file: Path) -> None:
    sections = [CallbackSection(type="ray.tune.logger:CSVLoggerCallback"), CallbackSection(type=f"{file}:Mine")]
    assert [type(one).__name__ for one in make_callbacks(sections)] == ["CSVLoggerCallback", "Mine"]


def test_a_callback_gets_the_arguments_beside_its_type(file: Path) -> None:
    given = {"type": f"{file}:Given", "project": "digits", "tags": {"team": "a"}}
    (made,) = make_callbacks([CallbackSection.model_validate(given)])
    assert vars(made) == {"project": "digits", "tags": {"team": "a"}}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"project": "digits", "projekt": 1}, r"Given: .* argument 'projekt' \(its arguments: project, tags\)"),
        ({"type": "{}:Mine", "rate": 1}, r"Mine: .* argument 'rate' \(its arguments: none\)"),
        ({"type": "{}:Needs"}, r"Needs: missing a required argument: 'server' \(its arguments: server\)"),
    ],
)
def test_arguments_that_a_callback_does_not_take_are_refused_before_it_is_made(
    arguments: dict[str, Any], problem: str, file: Path
) -> None:
    section = {"type": "{}:Given", **arguments}
    wrong = CallbackSection.model_validate({**section, "type": section["type"].format(file)})
    with pytest.raises(ConfigError, match=rf"search\.callbacks\.0: .*:{problem}"):
        check_callbacks([wrong])


def test_a_failure_is_blamed_on_the_callback_in_which_it_was_raised_and_on_no_other(file: Path) -> None:
    mine, given = make_callbacks([CallbackSection(type=f"{file}:Mine"), CallbackSection(type=f"{file}:Given")])
    with pytest.raises(KeyError) as raised:
        given.on_trial_result(1, [], None, {})
    found = blame(raised.value, [mine, given])
    assert str(found).startswith(
        f"The callback {type(given).__module__}:Given of search.callbacks failed: KeyError: 'loss'"
    )
    assert blame(raised.value, [mine]) is None


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("{}:Other", r"search\.callbacks\.0: .*:Other is not a ray\.tune\.Callback"),
        ("{}:Failing", r"search\.callbacks\.0: .*:Failing\(\) failed: ValueError: no server"),
        ("{}:Mime", r"search\.callbacks\.0: there is no class Mime in .*did you mean 'Mine'"),
        ("no_such_package:Mine", r"search\.callbacks\.0: there is no module no_such_package"),
    ],
)
def test_what_is_no_callback_is_refused(name: str, problem: str, file: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_callbacks([CallbackSection(type=name.format(file))])


@pytest.mark.parametrize("name", ["{}:Other", "{}:Mime", "no_such_package:Mine", "builtins:len"])
def test_a_search_with_what_is_no_callback_is_refused_before_it_takes_its_name(
    name: str, file: Path, tmp_path: Path
) -> None:
    config = {**GOOD, "search": {**GOOD["search"], "callbacks": [name.format(file)]}}
    with pytest.raises(ConfigError, match=r"search\.callbacks\.0"):
        search(config, runs_dir=tmp_path / "runs")
    written = tmp_path / "wrong.yaml"
    written.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"search\.callbacks\.0"):
        validate([str(written)])
    assert not (tmp_path / "runs").exists()


def test_callbacks_are_not_made_where_they_are_checked(file: Path) -> None:
    check_callbacks([CallbackSection(type=f"{file}:Mine"), CallbackSection(type=f"{file}:Failing")])
