"""Building a task: from a file's text, a module, or a built-in name; and what is said when it cannot be built."""

from __future__ import annotations

import dataclasses
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestray.platform.errors import DataError, TaskError
from orchestray.platform.task import TaskSource, build_task, validate
from orchestray.trainers.tasks import build, resolve
from orchestray.trainers.tasks.digits import Digits
from orchestray.trainers.tasks.params import TaskConfig
from orchestray.trainers.tasks.registry import TASKS

METHODS = """
    def build_model(self): return "model"
    def dataset(self, split): return split
    def to_batch(self, columns): return columns
    def loss(self, outputs, batch): return 0
    def metrics(self, outputs, batch): return {}
"""
MINE = f"""
class Mine:
    def __init__(self, width=3, *, depth=1):
        self.width, self.depth = width, depth
{METHODS}
"""


@pytest.fixture(autouse=True)
def _import_state_is_put_back() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def from_file(folder: Path, text: str, class_name: str = "Mine", **arguments: Any) -> TaskSource:
    file = folder / "my_task.py"
    file.write_text(text)
    return TaskSource.from_config(TaskConfig(type=f"{file}:{class_name}", **arguments))


def test_a_task_in_a_file_is_built_from_its_text_when_the_file_is_gone(tmp_path: Path) -> None:
    source = from_file(tmp_path, MINE, width=5)
    (tmp_path / "my_task.py").unlink()
    tmp_path.rmdir()
    task: Any = build(source)
    assert (task.width, task.depth, task.build_model()) == (5, 1, "model")


def test_a_source_survives_json_and_pickle(tmp_path: Path) -> None:
    source = from_file(tmp_path, MINE, width=5)
    assert source.file == str(tmp_path / "my_task.py")
    assert source.source == MINE
    assert TaskSource.from_json(json.loads(json.dumps(source.to_json()))) == source
    assert pickle.loads(pickle.dumps(source)) == source  # noqa: S301 - pickled a moment ago
    built_in = TaskSource.from_config(TaskConfig(type="digits", hidden=[3]))
    assert built_in == TaskSource("digits", {"hidden": [3]}, None, None)


def test_the_source_of_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"cannot read the task file .*gone\.py: No such file or directory"):
        TaskSource.from_config(TaskConfig(type=f"{tmp_path}/gone.py:Mine"))


@pytest.mark.parametrize("data", [{}, {"type": "digits", "arguments": 3}, {"arguments": {}}])
def test_a_damaged_description_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(TaskError, match="the description of the task is damaged"):
        TaskSource.from_json(data)


def test_objects_of_a_task_file_can_be_pickled_and_its_dataclasses_work(tmp_path: Path) -> None:
    text = "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\n" + MINE.replace(
        "class Mine:\n    def __init__(self, width=3, *, depth=1):\n        self.width, self.depth = width, depth",
        "class Mine:\n    width: int = 3",
    )
    task: Any = build(from_file(tmp_path, text, width=9))
    assert dataclasses.asdict(task) == {"width": 9}
    assert pickle.loads(pickle.dumps(task)).width == 9  # noqa: S301 - pickled a moment ago


def test_the_same_text_is_the_same_class_and_another_text_another(tmp_path: Path) -> None:
    first, again = (build(from_file(tmp_path, MINE)) for _ in range(2))
    changed = build(from_file(tmp_path, MINE + "\n# changed\n"))
    assert type(first) is type(again)
    assert type(first) is not type(changed)


def test_a_task_file_imports_what_lies_beside_it_before_anything_else(tmp_path: Path) -> None:
    (tmp_path / "tabnanny.py").write_text("NAME = 'mine'")  # there is a standard module of this name
    task: Any = build(from_file(tmp_path, "import tabnanny\n" + MINE + "    name = tabnanny.NAME\n"))
    assert task.name == "mine"
    assert sys.path[-1] == str(tmp_path)  # last from now on: others find what they always found


def test_a_task_in_a_module_is_imported() -> None:
    assert isinstance(build(TaskSource("orchestray.trainers.tasks.digits:Digits", {"hidden": [4]})), Digits)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_every_built_in_name_has_a_task_whose_arguments_are_those_of_the_config(name: str) -> None:
    needed: dict[str, dict[str, Any]] = {
        "parquet": {"path": "somewhere", "label": "y"},
        "images": {"path": "somewhere"},
        "mnist": {"path": "somewhere"},
        "huggingface": {"path": "somewhere", "model": {"model_type": "bert"}},
    }
    config = TASKS.params(name)(type=name, **needed.get(name, {}))
    task = build(TaskSource.from_config(config))  # every argument of the config is one of the constructor
    validate(task)
    assert type(task) is resolve(name)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        TaskError, match=r"there is no task 'digit' \(did you mean 'digits'\?\): built in are digits, python_source"
    ):
        build(TaskSource("digit"))
    with pytest.raises(TaskError, match=r"'digits' names no class: wanted \"path/to/file\.py:Class\""):
        build_task(TaskSource("digits"))


# -- what is wrong with a user's file ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("x = 1\nclass Mine(:\n", r"SyntaxError: invalid syntax \(FILE, line 2\)"),
        ("import no_such_thing\n", r"ModuleNotFoundError: No module named 'no_such_thing' \(FILE, line 1\)"),
        ("\n\ndef f():\n    return 1 / 0\n\nf()\n", r"ZeroDivisionError: division by zero \(FILE, line 4\)"),
        ("import json\n\njson.loads('{')\n", r"JSONDecodeError: .* \(FILE, line 3\)"),
        ("raise SystemError\n", r"SystemError \(FILE, line 1\)"),
        ("import sys\nsys.exit(3)\n", r"SystemExit: 3 \(FILE, line 2\)"),
    ],
    ids=["syntax", "import", "call", "library", "bare", "exit"],
)
def test_a_file_that_does_not_import_is_named_with_line_and_cause(tmp_path: Path, text: str, cause: str) -> None:
    source = from_file(tmp_path, text)
    file = str(tmp_path / "my_task.py")
    with pytest.raises(TaskError, match=rf"^the file {file} does not import: {cause.replace('FILE', file)}$"):
        build(source)
    with pytest.raises(TaskError, match="does not import"):
        build(source)  # no half-made module is left to be found


def test_a_traceback_shows_the_text_that_ran_although_the_file_has_changed(tmp_path: Path) -> None:
    source = from_file(tmp_path, MINE.replace("return 0", "return outputs.nothing"))
    (tmp_path / "my_task.py").write_text("# gone\n" * 50)
    task = build(source)
    with pytest.raises(AttributeError) as caught:
        task.loss(None, {})
    assert "return outputs.nothing" in str(caught.traceback[-1].statement)


def test_a_class_that_is_not_there_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"there is no class Mime in .*my_task\.py \(did you mean 'Mine'\?\)"):
        build(from_file(tmp_path, MINE, "Mime"))
    with pytest.raises(TaskError, match=r"there is no class Zzz in .*my_task\.py; it has Mine$"):
        build(from_file(tmp_path, MINE, "Zzz"))
    with pytest.raises(TaskError, match=r"Mine in .*my_task\.py is no class but a function"):
        build(from_file(tmp_path, "def Mine(): pass\n"))


def test_a_module_that_is_not_there_is_told_from_one_that_fails() -> None:
    with pytest.raises(TaskError, match=r"there is no module no_such_package\.tasks for task\.type: install it where"):
        build(TaskSource("no_such_package.tasks:Mine"))
    with pytest.raises(
        TaskError, match=r"there is no class Zzz in module orchestray\.trainers\.tasks\.digits; it has Digits"
    ):
        build(TaskSource("orchestray.trainers.tasks.digits:Zzz"))


def test_a_module_that_lacks_something_itself_is_not_called_missing(tmp_path: Path) -> None:
    (tmp_path / "half_there.py").write_text("\nimport no_such_thing\n")
    sys.path.insert(0, str(tmp_path))
    with pytest.raises(
        TaskError,
        match=r"module half_there does not import: ModuleNotFoundError: No module named 'no_such_thing' \(.*, line 2\)",
    ):
        build(TaskSource("half_there:Mine"))


@pytest.mark.parametrize("method", ["build_model()", "dataset(split)", "to_batch(columns)", "loss(outputs, batch)"])
def test_a_missing_method_is_named_as_it_would_be_called(tmp_path: Path, method: str) -> None:
    text = MINE.replace(f"def {method.partition('(')[0]}(", "def other(")
    with pytest.raises(TaskError, match=f"class Mine lacks method '{method}'".replace("(", r"\(").replace(")", r"\)")):
        build(from_file(tmp_path, text))


def test_all_that_is_wrong_with_the_methods_is_said_at_once(tmp_path: Path) -> None:
    text = MINE.replace("def metrics", "def other").replace("loss(self, outputs, batch)", "loss(self, outputs)")
    with pytest.raises(TaskError) as caught:
        build(from_file(tmp_path, text))
    assert str(caught.value).splitlines() == [
        "class Mine: loss(outputs) must be callable as 'loss(outputs, batch)'",
        "class Mine lacks method 'metrics(outputs, batch)'",
    ]


def test_names_without_an_order_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"class Mine: class_names must be a list of names in their order, got a set"):
        build(
            from_file(
                tmp_path, MINE.replace("    def build_model", '    class_names = {"a", "b"}\n\n    def build_model')
            )
        )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"widht": 3}, r"task\.widht: is no argument of Mine \(did you mean 'width'\?\)"),
        ({"zzz": 3}, r"task\.zzz: is no argument of Mine; it has width, depth, name"),
        ({}, r"task\.name: is required by Mine, and missing"),
    ],
)
def test_wrong_arguments_are_named(tmp_path: Path, arguments: dict[str, Any], sentence: str) -> None:
    text = MINE.replace("width=3, *, depth=1", "width=3, *, depth=1, name")
    with pytest.raises(TaskError, match=sentence):
        build(from_file(tmp_path, text, **arguments))


def test_a_constructor_that_takes_anything_is_given_anything(tmp_path: Path) -> None:
    text = MINE.replace("width=3, *, depth=1", "width=3, **more").replace("width, depth\n", "width, more\n")
    task: Any = build(from_file(tmp_path, text, color="red"))
    assert task.depth == {"color": "red"}


def test_a_constructor_that_fails_is_told_with_its_line(tmp_path: Path) -> None:
    text = MINE.replace("self.width, self.depth = width, depth", "self.width = 1 // width")
    file = tmp_path / "my_task.py"
    with pytest.raises(TaskError, match=rf"^Mine\(width=0\) failed: ZeroDivisionError: .* by zero \({file}, line 4\)$"):
        build(from_file(tmp_path, text, width=0))


def test_our_own_errors_pass_as_they_are(tmp_path: Path) -> None:
    text = "from orchestray.platform.errors import DataError\n" + MINE.replace(
        "self.width, self.depth = width, depth", "raise DataError('the data is wet')"
    )
    with pytest.raises(DataError, match="the data is wet"):
        build(from_file(tmp_path, text))
