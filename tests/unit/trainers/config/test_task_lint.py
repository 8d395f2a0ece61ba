"""A user's task in a file is looked at, never run."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from orchestray.cli.validate import validate
from orchestray.platform.errors import ConfigError
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.config.task_lint import module_problems

METHODS = """
    def build_model(self): ...
    def dataset(self, split): ...
    def to_batch(self, columns): ...
    def loss(self, outputs, batch): ...
    def metrics(self, outputs, batch): ...
"""


def problems_of(tmp_path: Path, source: str, class_name: str = "Mine", **arguments: Any) -> list[str]:
    (tmp_path / "my_task.py").write_text(dedent(source))
    (tmp_path / "c.yaml").write_text(
        "name: a\ntrain: {batch_size: 8, steps: 3, optimizer: {type: sgd, lr: 1}}\n"
        f"task: {dict(type=f'my_task.py:{class_name}', **arguments)}\n"
    )
    try:
        config = load_train_config(tmp_path / "c.yaml")
    except ConfigError as error:
        return [problem.removeprefix(f"{tmp_path / 'c.yaml'}: ") for problem in error.problems]
    assert config.task.type == f"{tmp_path / 'my_task.py'}:{class_name}"
    assert config.task.arguments == arguments
    return []


def test_the_file_is_not_run(tmp_path: Path) -> None:
    source = f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit(3)\nclass Mine:{METHODS}"
    assert problems_of(tmp_path, source) == []
    assert not (tmp_path / "ran").exists()


def test_a_file_that_does_not_parse_is_named_with_its_line(tmp_path: Path) -> None:
    assert problems_of(tmp_path, "import os\nclass Mine\n") == [
        f"task.type: {tmp_path / 'my_task.py'}, line 2 is no Python: expected ':'"
    ]


def test_a_class_that_is_not_there_is_named_with_the_nearest(tmp_path: Path) -> None:
    assert problems_of(tmp_path, f"class Mime:{METHODS}") == [
        "task.type: there is no class Mine in my_task.py; did you mean 'Mime'?"
    ]
    assert problems_of(tmp_path, f"class Xylophone:{METHODS}") == [
        "task.type: there is no class Mine in my_task.py; it has Xylophone"
    ]
    assert problems_of(tmp_path, "x = 1") == ["task.type: there is no class Mine in my_task.py; it has no class at all"]


def test_each_method_that_lacks_is_named_with_how_it_is_called(tmp_path: Path) -> None:
    source = """
        class Mine:
            def build_model(self): ...
            def dataset(self, split): ...
            to_batch = staticmethod(dict)
    """
    assert problems_of(tmp_path, source) == [
        "task.type: class Mine in my_task.py lacks method 'loss(outputs, batch)'",
        "task.type: class Mine in my_task.py lacks method 'metrics(outputs, batch)'",
    ]


@pytest.mark.parametrize(
    "source",
    [
        "from elsewhere import Mine",
        "from elsewhere import *",
        "import elsewhere\nMine = elsewhere.make()",
        "from elsewhere import Base\nclass Mine(Base): ...",
        "from elsewhere import fill\n@fill\nclass Mine: ...",
        "class Mine(metaclass=type): ...",
        "class Mine:\n    def __getattr__(self, name): ...",
        f"import sys\nif sys.platform:\n    class Mine: {METHODS.replace('    def', '        def')}",
    ],
)
def test_what_a_look_cannot_tell_is_taken_to_be_right(tmp_path: Path, source: str) -> None:
    assert problems_of(tmp_path, source) == []


def test_arguments_are_held_beside_the_constructor(tmp_path: Path) -> None:
    source = f"class Mine:{METHODS}    def __init__(self, hidden, depth=2, *, width, seed=0): ..."
    assert problems_of(tmp_path, source, hidden=3, width=1) == []
    assert problems_of(tmp_path, source, hiden=3, depth=1) == [
        "task.hiden: is no argument of Mine; did you mean 'hidden'?",
        "task.hidden: is required by Mine, and missing",
        "task.width: is required by Mine, and missing",
    ]
    assert problems_of(tmp_path, f"class Mine:{METHODS}", colour=1) == [
        "task.colour: is no argument of Mine; it takes none"
    ]
    assert problems_of(tmp_path, f"class Mine:{METHODS}    def __init__(self, **more): ...", colour=1) == []


def test_a_task_in_a_module_is_not_imported(tmp_path: Path) -> None:
    config = load_train_config(
        {
            "name": "a",
            "task": {"type": "no_such_package.module:Mine", "a": 1},
            "train": {"batch_size": 8, "steps": 3, "optimizer": {"type": "sgd", "lr": 1}},
        }
    )
    assert config.task.type == "no_such_package.module:Mine"


MOTIFS = f"class Motifs:{METHODS}    def __init__(self, width): ..."


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a package on the path, a module in the working directory, and a config there."""
    installed, here = tmp_path / "installed" / "sequences", tmp_path / "here"
    installed.mkdir(parents=True)
    here.mkdir()
    (installed / "__init__.py").write_text("raise SystemExit('imported')")
    (installed / "motifs.py").write_text(MOTIFS)
    (here / "beside.py").write_text(MOTIFS)
    (here / "c.yaml").write_text(
        "{name: a, task: {type: digits, width: 3}, train: {batch_size: 8, steps: 3, optimizer: {type: sgd, lr: 1}}}"
    )
    monkeypatch.syspath_prepend(str(installed.parent))
    monkeypatch.chdir(here)
    return here


@pytest.mark.parametrize(
    ("task_type", "problem"),
    [
        (
            "no_such_package_here.module:Mine",
            "there is no module no_such_package_here here; install it, put its folder",
        ),
        ("seqences.motifs:Motifs", "there is no module seqences here; did you mean 'sequences'?; install it"),
        ("sequences.motif:Motifs", "there is no module motif in sequences; did you mean 'motifs'?"),
        ("sequences.motifs.deep:Motifs", "there is no module deep in sequences.motifs"),
        ("sequences.motifs:Motif", "there is no class Motif in motifs.py; did you mean 'Motifs'?"),
    ],
)
def test_a_module_that_validate_cannot_find_is_named_with_the_nearest_and_nothing_is_imported(
    modules: Path, task_type: str, problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(["c.yaml", f"task.type={task_type}"])
    [line] = caught.value.problems
    assert line.startswith(f"c.yaml: task.type: {problem}")
    assert "sequences" not in sys.modules


def test_a_module_is_looked_for_where_workers_do(modules: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Look on the path, and in the working directory."""
    validate(["c.yaml", "task.type=sequences.motifs:Motifs"])
    validate(["c.yaml", "task.type=beside:Motifs"])
    assert capfd.readouterr().out.count("ok (") == 2


def test_a_namespace_package_in_another_is_taken_to_be_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outer_space" / "inner_space").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert list(module_problems("outer_space.inner_space.tasks:Mine", {})) == []


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ("{'accuracy': 1, 'f1': 2}", "did you mean 'accuracy'? (it has: accuracy, f1, loss)"),
        ("{}", "(it has: loss)"),
        ("{**self.more, 'accuracy': 1}", None),
        ("dict(accuracy=1)", None),
        ("self.told", None),
    ],
)
def test_a_goal_that_no_validation_tells_of_is_refused_as_far_as_a_look_tells(
    tmp_path: Path, returned: str, problem: str | None
) -> None:
    methods = METHODS.replace("batch): ...\n    def metrics(self, outputs, batch): ...", "batch): ...")
    (tmp_path / "my_task.py").write_text(
        f"class Mine:{methods}\n    def metrics(self, outputs, batch):\n        return {returned}\n"
    )
    goal = {"metric": "acuracy", "value": 1, "mode": "max"}
    source = {
        "name": "a",
        "task": {"type": f"{tmp_path / 'my_task.py'}:Mine"},
        "train": {"batch_size": 8, "steps": 3, "optimizer": {"type": "sgd", "lr": 1}, "until": goal},
    }
    found: tuple[str, ...] = ()
    try:
        load_train_config(source)
    except ConfigError as error:
        found = error.problems
    text = f"config: train.until.metric: the task has no metric 'acuracy'{'' if returned == '{}' else ';'} {problem}"
    assert found == ((text,) if problem else ())
    assert load_train_config(source, ["train.until.metric=loss"]).train.until is not None


def test_a_goal_of_a_student_may_be_the_loss_of_its_task() -> None:
    source = {
        "name": "a",
        "task": {"type": "digits"},
        "train": {"batch_size": 8, "steps": 3, "optimizer": {"type": "sgd", "lr": 1}},
    }
    until = "train.until={metric: task_loss, value: 0.1}"
    with pytest.raises(ConfigError, match="has no metric 'task_loss'; did you mean 'loss'"):
        load_train_config(source, [until])
    with pytest.raises(ConfigError) as caught:
        load_train_config(source, [until, "distill.teacher=nowhere"])
    assert [line for line in caught.value.problems if "until" in line] == []


def test_a_metric_of_the_best_checkpoint_that_the_task_does_not_report_is_refused() -> None:
    source = {
        "name": "a",
        "task": {"type": "digits"},
        "train": {"batch_size": 8, "steps": 3, "optimizer": {"type": "sgd", "lr": 1}},
    }
    with pytest.raises(ConfigError, match=r"checkpoint\.best\.metric: the task has no metric 'acuracy'; did you mean"):
        load_train_config(source, ["checkpoint.best={metric: acuracy}"])


def test_arguments_that_no_file_can_hold_are_refused() -> None:
    source = {
        "name": "a",
        "task": {"type": "module:Mine", "a": object(), "b": [{"c": (1, None, 2.5, "x", True)}], "d": {1: 2}},
        "train": {"batch_size": 8, "steps": 3, "optimizer": {"type": "sgd", "lr": 1}},
    }
    with pytest.raises(ConfigError) as caught:
        load_train_config(source)
    wanted = "must be plain data (numbers, text, true, false, null, lists, mappings), got"
    assert caught.value.problems == (
        f"config: task.a: {wanted} a value of type object",
        f'config: task.d: {wanted} {{"1": 2}}',
    )


def test_the_config_of_a_run_can_be_read_after_its_tasks_file_has_moved(tmp_path: Path) -> None:
    source = {
        "name": "a",
        "task": {"type": str(tmp_path / "gone.py:Mine")},
        "train": {"batch_size": 8, "steps": 3, "optimizer": {"type": "sgd", "lr": 1}},
    }
    assert load_train_config(source, look_at_task=False).task.type == str(tmp_path / "gone.py:Mine")
    with pytest.raises(ConfigError, match="there is no file"):
        load_train_config(source)
