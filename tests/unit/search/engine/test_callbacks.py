"""Callbacks of Ray Tune by their names; what is none is refused with a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.search.config.schema import CallbackSection
from orchestray.search.engine.callbacks import blame, make_callbacks

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
    wrong = CallbackSection.model_validate({**given, "projekt": 1})
    with pytest.raises(ConfigError, match=r"Given\(project='digits', .* failed: TypeError: .*projekt"):
        make_callbacks([wrong])


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
