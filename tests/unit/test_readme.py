"""The commands of the README are what they say: targets that exist, commands that are listed, configs that validate."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

from orchestray.cli.app import COMMANDS
from orchestray.trainers.config.load import load_train_config
from support.cli import orchestray_here

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands(program: str) -> list[list[str]]:
    """Return the words of every line of the README's shell blocks that runs `program`, without the prompt `$ `."""
    found = []
    for block in re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            first, *_ = [*line.removeprefix("$ ").split(), ""]
            if Path(first).name == program:  # other lines may be a part of a text between quotation marks
                found.append(shlex.split(line.removeprefix("$ "), comments=True))
    return found


ORCHESTRAY = commands("orchestray")
CONFIGS = sorted(set(re.findall(r"configs/[\w./-]+\.yaml", README)))


def test_the_two_commands_that_do_all_the_set_up_are_there() -> None:
    assert [words[1:] for words in commands("make")][:2] == [["demo"], ["test"]]


def test_the_demo_trains_the_digits_and_the_test_runs_pytest() -> None:
    def recipe(target: str) -> str:
        # As if everything were installed: what is left is the command itself.
        dry = [
            "make",
            "--no-print-directory",
            "--dry-run",
            "--old-file=.venv/.installed",
            "--old-file=.venv/.installed-dev",
            target,
        ]
        return subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()[-1]

    assert recipe("demo") == ".venv/bin/orchestray train configs/train/digits.yaml"
    assert recipe("test").split()[1:4] == [".venv/bin/python", "-m", "pytest"]


@pytest.mark.parametrize("words", commands("make"), ids=" ".join)
def test_a_make_target_of_the_readme_exists(words: list[str]) -> None:
    done = subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@cache
def help_of(*command: str) -> str:
    """Return the help text of a command, none of it cut."""
    with mock.patch.dict(os.environ, {"COLUMNS": "200"}):
        return orchestray_here(*command, "--help").stdout


@pytest.mark.parametrize("words", ORCHESTRAY, ids=" ".join)
def test_a_command_of_the_readme_has_the_options_it_is_shown_with(words: list[str]) -> None:
    command = next(word for word in words[1:] if not word.startswith("-"))
    assert command in COMMANDS
    shown = [word for word in words[1:] if re.fullmatch(r"[a-z]+", word)][:2]
    helps = [help_of(*shown[:1]), help_of(*shown)]
    for option in (word.partition("=")[0] for word in words if word.startswith("--")):
        assert any(option in text for text in helps), f"{option} is no option of orchestray {command}"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_of_the_readme_is_there_and_validates(name: str) -> None:
    assert load_train_config(ROOT / name).name
