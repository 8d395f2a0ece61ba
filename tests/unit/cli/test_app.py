"""The command line as a user types it, where nothing has to be started."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestray import __version__
from orchestray.cli import app
from support.cli import orchestray_here
from support.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = list(app.COMMANDS)


def orchestray(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run the command line in this process: an exception that a user would see as a traceback is one here."""
    with contextlib.chdir(cwd):
        return orchestray_here(*arguments)


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run what the installation has put beside the interpreter."""
    command = [Path(sys.executable).with_name("orchestray"), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_help_lists_each_command_that_is_there_and_no_other() -> None:
    done = orchestray("--help")
    assert done.returncode == 0
    listed = [line.split()[1] for line in done.stdout.partition("Commands")[2].splitlines() if line.startswith("│ ")]
    assert listed == COMMANDS


def test_every_module_of_a_command_is_in_the_table() -> None:
    folder = ROOT / "src" / "orchestray" / "cli"
    commands = {file.stem for file in folder.glob("*.py") if "\napp = typer.Typer(" in file.read_text()} - {"app"}
    assert commands == set(app.COMMANDS)


def test_a_full_disk_under_what_is_printed_is_a_sentence() -> None:
    command = [Path(sys.executable).with_name("orchestray"), "systems"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("could not print: the disk with the file of the output is full")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_commands_help_has_a_worked_example_and_no_clutter(command: str) -> None:
    done = orchestray(command, "--help")
    assert done.returncode == 0, done.stderr
    assert f"orchestray {command} " in done.stdout.partition("Example")[2]
    assert "completion" not in done.stdout


@pytest.mark.parametrize("command", [("train", "CONFIG"), ("search", "CONFIG"), ("runs", "list"), ("dashboard",)])
def test_a_file_in_the_place_of_the_run_directories_is_refused_by_each_command(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "runs").touch()
    done = orchestray(*command, "--runs-dir", "runs", cwd=tmp_path)
    assert done.returncode == 2
    assert "Invalid value for '--runs-dir'" in done.stderr
    assert "is a file" in done.stderr


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        (["train"], "train [OPTIONS] CONFIG [KEY.PATH=VALUE]..."),
        (["jobs", "stop"], "jobs stop [OPTIONS] ID"),
        (["submit"], "submit [OPTIONS] COMMAND..."),
    ],
)
def test_the_usage_line_names_arguments_as_they_are_typed(command: list[str], usage: str) -> None:
    done = orchestray(*command, "--help")
    assert f"Usage: orchestray {usage}" in [line.strip() for line in done.stdout.splitlines()]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_of_a_group_has_a_worked_example(command: str) -> None:
    loaded = app.load_command(command)
    lacking = [
        name
        for name, part in getattr(loaded, "commands", {}).items()
        if f"orchestray {command} {name}" not in (part.epilog or "")
    ]
    assert lacking == []


@pytest.mark.parametrize(
    "arguments", [["trani"], ["--nonsense"], ["validate", "--nonsense"], ["validate", "--schema", "x"], []]
)
def test_wrong_arguments_end_with_status_2_and_no_traceback(arguments: list[str]) -> None:
    done = orchestray(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_mistyped_command_is_answered_with_the_nearest_and_status_2_and_no_traceback() -> None:
    done = script("dashbord")
    assert done.returncode == 2
    assert "Did you mean 'dashboard'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_version_is_printed() -> None:
    assert script("--version").stdout == f"orchestray {__version__}\n"


def test_validate_says_what_each_config_would_do() -> None:
    names = [f"configs/train/{name}.yaml" for name in ("digits", "digits-single", "digits-newton")]
    done = orchestray("validate", *names, "train.epochs=3")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "configs/train/digits.yaml: ok (digits, 3 epochs of sgd in batches of 64, 2 workers)",
        "configs/train/digits-single.yaml: ok (digits, 3 epochs of sgd in batches of 64, 1 worker)",
        "configs/train/digits-newton.yaml: ok (digits, 3 epochs of newton in batches of 1438, 2 workers)",
    ]
    assert done.stderr == ""


def test_validate_names_a_users_own_space_as_the_config_does() -> None:
    done = orchestray("validate", "configs/search/digits-own-space.yaml")
    assert "over spaces/towers.py:Towers networks of digits" in done.stdout


def test_validate_prints_the_problems_of_every_config_on_stderr_and_exits_2(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "name: a\ntask: {type: digits}\ntrain: {batch_size: -1, steps: 2, optimizer: {type: sgd}}"
    )
    (tmp_path / "b.yaml").write_text("name: [")
    done = orchestray("validate", "a.yaml", "missing.yaml", "b.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "a.yaml: train.batch_size: must be >= 1, got -1",
        "a.yaml: train.optimizer.lr: is required, and missing",
        "missing.yaml: there is no such file",
        "b.yaml: line 1, column 8: expected the node content, but found '<stream end>'",
    ]


def test_validate_without_a_config_asks_for_one() -> None:
    done = orchestray("validate")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "orchestray validate: which config? For example: orchestray validate configs/train/digits.yaml\n"
    )


def test_the_schema_is_printed_as_json() -> None:
    schema = json.loads(orchestray("validate", "--schema", "train").stdout)
    assert set(schema["required"]) == {"task", "train"}
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (f"task.type={'a' * 300}.py:Mine", "task.type: cannot read"),
        ("task.type=nosuchmodule:Mine", "task.type: there is no module nosuchmodule here"),
        ("train.until={metric: acuracy, value: 0.9}", "the task has no metric 'acuracy'; did you mean 'accuracy'?"),
    ],
    ids=["longer than a file's name", "no such module", "no such metric"],
)
def test_validate_refuses_an_override_in_a_sentence(override: str, problem: str) -> None:
    done = orchestray("validate", "configs/train/digits.yaml", override)
    assert (done.returncode, done.stdout) == (2, "")
    assert problem in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("typed", "completed"),
    [("orchestray tr", ["train"]), ("orchestray train --res", ["--resume"])],
    ids=["name", "option"],
)
def test_a_shell_completes_commands_and_their_options(typed: str, completed: list[str]) -> None:
    told = {"_ORCHESTRAY_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    command = [sys.executable, "-c", "from orchestray.cli.app import main; main()"]
    done = subprocess.run(command, env={**os.environ, **told}, check=True, capture_output=True, text=True)
    assert done.stdout.split() == completed


@pytest.mark.parametrize("number", ["inf", "-inf", "nan"])
def test_an_option_takes_no_number_that_is_not_finite(number: str) -> None:
    done = orchestray("simulate", "ring", "--compute-ms", number)
    assert done.returncode == 2
    assert "--compute-ms" in done.stderr
