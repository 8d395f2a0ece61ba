"""The table of systems claims nothing it cannot show: every named test exists, every named command validates."""

from __future__ import annotations

import ast
import json
import os
import shlex
import subprocess
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest

from orchestray.cli.app import COMMANDS
from orchestray.cli.systems_table import GROUPS, State, System, find_system, load_systems, parse_systems
from orchestray.platform.errors import ConfigError
from orchestray.search.config.load import load_search_config
from orchestray.serving.config.load import load_serve_config
from orchestray.trainers.config.load import load_train_config
from support.cli import orchestray_here

ROOT = Path(__file__).parents[3]
NUM_SYSTEMS = {"A": 52, "B": 38, "C": 46, "D": 33, "E": 35, "F": 12, "G": 47, "H": 22, "I": 33}
SKIPPING = {"skip", "skipif", "xfail", "importorskip"}


# -- what a row may claim ----------------------------------------------------------------------------------------------


def row_problems(system: System, root: Path = ROOT) -> list[str]:
    """Return what a row claims and cannot show."""
    problems = []
    if system.group not in GROUPS:
        problems.append(f"group {system.group!r} is none of {', '.join(GROUPS)}")
    if not system.name.strip() or not system.what.strip():
        problems.append("a row needs a name and what it is")
    if bool(system.runs_with) != bool(system.tests):
        problems.append("a system works with a command and a test, or not at all")
    if system.context and (system.runs_with or system.tests):
        problems.append("a system that is context only has nothing that runs or shows it")
    problems += [problem for test in system.tests if (problem := test_problem(test, root))]
    if system.runs_with and (problem := command_problem(system.runs_with, root)):
        problems.append(problem)
    return [f"{system.name}: {problem}" for problem in problems]


def test_problem(node_id: str, root: Path) -> str | None:
    """Return why pytest would not run `path::[Class::]function`, judged by the file's text; None if it would."""
    path, *names = node_id.partition("[")[0].split("::")
    file = root / path
    if not (path.startswith("tests/") and file.name.startswith("test_") and file.is_file()):
        return f"{path} is no test file"
    scope: ast.AST = ast.parse(file.read_text(encoding="utf-8"))
    if _marks_module_skipped(scope):
        return f"{path} skips its tests"
    for name in names:
        found = [node for node in ast.iter_child_nodes(scope) if getattr(node, "name", None) == name]
        if not found:
            return f"{path} has no {name}"
        scope = found[-1]
        if any(_mentions_skipping(decorator) for decorator in getattr(scope, "decorator_list", [])):
            return f"{name} is skipped"
    if not (isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef) and scope.name.startswith("test")):
        return f"{node_id} is no test function"
    if any(isinstance(node, ast.Call) and _mentions_skipping(node.func) for node in ast.walk(scope)):
        return f"{scope.name} may skip itself"
    return None


test_problem.__test__ = False  # type: ignore[attr-defined]  # a helper with the name of a test


def _marks_module_skipped(module: ast.AST) -> bool:
    statements = [node for node in ast.iter_child_nodes(module) if isinstance(node, ast.Assign | ast.Expr)]
    return any(_mentions_skipping(statement) for statement in statements)


def _mentions_skipping(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Attribute) and part.attr in SKIPPING for part in ast.walk(node))


def command_problem(command: str, root: Path) -> str | None:
    """Return why the command would be refused before it does anything; None if it would not."""
    program, *words = shlex.split(command)
    if program != "orchestray" or not words or words[0] not in COMMANDS:
        return f"`{command}` is no command"
    configs = [word for word in words if word.endswith(".yaml")]
    if not configs and words[0] in {"train", "search", "validate"}:
        return f"`{command}` names no config"
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    for config in configs:
        if not (root / config).is_file():
            return f"there is no {config}"
        if "\ndistill:" in (root / config).read_text(encoding="utf-8"):
            overrides.append("distill=null")  # its teacher is what another command leaves
        try:
            if words[0] == "serve":
                load_serve_config(root / config, overrides, look_at_files=False)  # its runs are what others leave
            else:
                (load_search_config if words[0] == "search" else load_train_config)(root / config, overrides)
        except ConfigError as error:
            return str(error)
    return None


def test_no_row_claims_what_it_cannot_show() -> None:
    assert [problem for system in load_systems() for problem in row_problems(system)] == []


def test_the_table_has_each_of_the_318_systems_once_in_its_group() -> None:
    systems = load_systems()
    assert Counter(system.group for system in systems) == NUM_SYSTEMS
    assert len(systems) == sum(NUM_SYSTEMS.values()) == 318
    assert len({system.name.casefold() for system in systems}) == 318


def test_the_states_are_what_the_rows_say() -> None:
    states = Counter(system.state for system in load_systems())
    assert set(states) == {State.WORKS, State.CONTEXT}
    assert states[State.WORKS] == sum(bool(system.tests) for system in load_systems())


# -- the checks find what is wrong -------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_good.py").write_text(
        "import pytest\n"
        "def test_runs(): pass\n"
        "@pytest.mark.skip\ndef test_skipped(): pass\n"
        "@pytest.mark.skipif(True, reason='')\nclass TestSkipped:\n    def test_inside(self): pass\n"
        "class TestClass:\n    def test_inside(self): pass\n"
        "def test_gives_up():\n    pytest.skip('no')\n"
        "def helper(): pass\n"
    )
    (tmp_path / "tests" / "test_off.py").write_text(
        "import pytest\npytestmark = pytest.mark.skip\ndef test_a(): pass\n"
    )
    return tmp_path


@pytest.mark.parametrize("node_id", ["::test_runs", "::test_runs[1-2]", "::TestClass::test_inside"])
def test_a_test_that_runs_is_accepted(project: Path, node_id: str) -> None:
    assert test_problem("tests/test_good.py" + node_id, project) is None


@pytest.mark.parametrize(
    ("node_id", "problem"),
    [
        ("tests/test_absent.py::test_runs", "no test file"),
        ("tests/test_good.py::test_absent", "has no test_absent"),
        ("tests/test_good.py::TestClass::test_runs", "has no test_runs"),
        ("tests/test_good.py::test_skipped", "is skipped"),
        ("tests/test_good.py::TestSkipped::test_inside", "is skipped"),
        ("tests/test_good.py::test_gives_up", "may skip itself"),
        ("tests/test_good.py::helper", "no test function"),
        ("tests/test_good.py::TestClass", "no test function"),
        ("tests/test_good.py", "no test function"),
        ("tests/test_off.py::test_a", "skips its tests"),
    ],
)
def test_a_test_that_does_not_run_is_refused(project: Path, node_id: str, problem: str) -> None:
    assert problem in (test_problem(node_id, project) or "")


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("torchrun train.py", "is no command"),
        ("orchestray fly", "is no command"),
        ("orchestray train", "names no config"),
        ("orchestray train configs/train/absent.yaml", "there is no configs/train/absent.yaml"),
        ("orchestray train configs/train/digits.yaml train.batchsize=3", "batch_size"),
    ],
)
def test_a_command_that_would_be_refused_is_found(command: str, problem: str) -> None:
    assert problem in (command_problem(command, ROOT) or "")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (System("B", "x", "y", runs_with="orchestray systems"), "with a command and a test"),
        (System("B", "x", "y", tests=("tests/test_good.py::test_runs",)), "with a command and a test"),
        (System("B", "x", "y", "orchestray systems", ("tests/test_good.py::test_runs",), "a peer"), "context only"),
        (System("Z", "x", "y"), "group 'Z'"),
        (System("B", "x", ""), "needs a name and what it is"),
    ],
)
def test_a_row_that_contradicts_itself_is_found(project: Path, row: System, problem: str) -> None:
    assert problem in "\n".join(row_problems(row, project))
    assert row.context or row.state is State.NOT_YET


def test_a_table_with_a_broken_line_is_refused() -> None:
    with pytest.raises(ValueError, match="Line 2 of the table of systems has 2 columns"):
        parse_systems("group\tname\twhat\truns_with\ttests\tcontext\nB\tSGD\n")
    with pytest.raises(ValueError, match="heading"):
        parse_systems("name\tgroup\n")


# -- finding one -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("ADAM", "Adam"),
        ("  nesterov   momentum ", "Nesterov momentum"),
        ("hogwild", "HOGWILD"),
        ("downpour", "Downpour SGD"),
    ],
)
def test_a_system_is_found_in_any_case_and_by_a_part_of_its_name(asked: str, name: str) -> None:
    assert find_system(asked).name == name


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("adagrat", "Did you mean 'AdaGrad'"),
        ("convolution", "More than one system"),
        ("", "no system"),
        ("q7q", "list them"),
    ],
)
def test_a_name_that_is_no_system_is_refused_with_the_nearest(asked: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_system(asked)


# -- the command -------------------------------------------------------------------------------------------------------


def orchestray(*arguments: str) -> subprocess.CompletedProcess[str]:
    with mock.patch.dict(os.environ, {"COLUMNS": "80", "NO_COLOR": "1"}):
        return orchestray_here(*arguments)


def squeezed(text: str) -> str:
    """Return the text without the places where it was wrapped."""
    return "".join(text.split())


def test_the_command_shows_every_working_system_with_command_and_test_in_80_columns() -> None:
    done = orchestray("systems")
    assert done.returncode == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    working = [system for system in load_systems() if system.state is State.WORKS]
    assert f"{len(working)} of 318 systems work here" in done.stdout
    shown = squeezed(done.stdout)
    for system in working:
        for text in (system.name, system.runs_with, *system.tests):
            assert squeezed(text) in shown


def test_the_command_lists_the_rest_with_the_reason_why() -> None:
    result = json.loads(orchestray("systems", "--missing", "--json").stdout.splitlines()[-1])
    assert {system["state"] for system in result["systems"]} == {"context"}
    assert len(result["systems"]) == result["not_yet"] + result["context"] == 318 - result["works"]
    shown = orchestray("systems", "--missing")
    assert max(len(line) for line in shown.stdout.splitlines()) <= 80
    assert shown.stdout.count("context only: ") == result["context"]


def test_json_holds_the_working_rows_whole() -> None:
    result = json.loads(orchestray("systems", "--json").stdout)
    assert [row["name"] for row in result["systems"]] == [s.name for s in load_systems() if s.state is State.WORKS]
    assert all(row["tests"] and row["runs_with"] and row["title"] for row in result["systems"])


def test_one_system_is_shown_whole_and_an_unknown_one_exits_2_without_a_traceback() -> None:
    adam = find_system("adam")
    done = orchestray("systems", "adam")
    assert done.returncode == 0
    for text in (adam.name, adam.what, adam.state.value):
        assert text in done.stdout
    assert json.loads(orchestray("systems", "adam", "--json").stdout) == adam.to_json()
    unknown = orchestray("systems", "adagrat")
    assert unknown.returncode == 2
    assert unknown.stdout == ""
    assert unknown.stderr.strip() == "There is no system called 'adagrat'. Did you mean 'AdaGrad'?"
