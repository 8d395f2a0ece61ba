"""Callbacks of Ray Tune by their names; what is none is refused with a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.search.engine.callbacks import make_callbacks

OWN = """
from ray.tune import Callback

class Mine(Callback):
    def on_trial_result(self, iteration, trials, trial, result, **info):
        pass

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
    made = make_callbacks(["ray.tune.logger:CSVLoggerCallback", f"{file}:Mine"])
    assert [type(one).__name__ for one in made] == ["CSVLoggerCallback", "Mine"]


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
        make_callbacks([name.format(file)])
