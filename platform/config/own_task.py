"""A look at a task in a user's file, without running it: are the class, its methods and its arguments there?

What a look cannot tell (a base class, a decorator, an import) is taken to be right; building the task says the rest.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from orchestray.platform.config.problems import Problem, nearest
from orchestray.platform.config.tasks import BUILT_IN

METHODS = {
    "build_model": "build_model()",
    "dataset": "dataset(split)",
    "to_batch": "to_batch(columns)",
    "loss": "loss(outputs, batch)",
    "metrics": "metrics(outputs, batch)",
}
"""The methods of a task, and how each is called."""

_MODULE = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")


def is_file_type(task_type: str) -> bool:
    """Whether a task's type names a class in a file (in contrast to a module, or a built-in task)."""
    place, colon, _ = task_type.rpartition(":")
    return bool(colon) and (place.endswith(".py") or "/" in place)


def problems_of(task_type: str, arguments: Mapping[str, Any]) -> Iterator[Problem]:
    """What is wrong with a task that is not built in; `task_type` has its path absolute."""
    place, colon, class_name = task_type.rpartition(":")
    if not colon:
        there_are = f'built in are {", ".join(sorted(BUILT_IN))}; your own is "path/to/file.py:Class" or "module:Class"'
        yield Problem("task.type", f"there is no task {task_type!r}{nearest(task_type, BUILT_IN)} ({there_are})")
    elif not class_name.isidentifier():
        yield Problem("task.type", f"must end with the name of a class after the colon, got {task_type!r}")
    elif is_file_type(task_type):
        yield from _file_problems(Path(place), class_name, arguments)
    elif not _MODULE.match(place):
        yield Problem("task.type", f'must be "path/to/file.py:Class" or "package.module:Class", got {task_type!r}')


def _file_problems(file: Path, class_name: str, arguments: Mapping[str, Any]) -> Iterator[Problem]:
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except FileNotFoundError:
        yield Problem("task.type", f"there is no file {file}")
    except OSError as error:
        yield Problem("task.type", f"cannot read {file}: {error.strerror}")
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        yield Problem("task.type", f"{file}{line} is no Python: {reason}")
    else:
        yield from _class_problems(tree, file, class_name, arguments)


def _class_problems(tree: ast.Module, file: Path, class_name: str, arguments: Mapping[str, Any]) -> Iterator[Problem]:
    bound = _names_bound(tree.body)
    if class_name not in bound and "*" not in bound and "__getattr__" not in bound:
        classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        there = nearest(class_name, classes) or f"; it has {', '.join(classes) or 'no class at all'}"
        yield Problem("task.type", f"there is no class {class_name} in {file.name}{there}")
        return
    node = bound.get(class_name)
    if not isinstance(node, ast.ClassDef) or node.decorator_list or node.keywords or not _plain_bases(node):
        return
    inside = _names_bound(node.body)
    for method, call in METHODS.items():
        if method not in inside and "__getattr__" not in inside:
            yield Problem("task.type", f"class {class_name} in {file.name} lacks method '{call}'")
    yield from _argument_problems(inside.get("__init__"), class_name, arguments)


def _plain_bases(node: ast.ClassDef) -> bool:
    return all(isinstance(base, ast.Name) and base.id == "object" for base in node.bases)


def _argument_problems(constructor: ast.AST | None, class_name: str, arguments: Mapping[str, Any]) -> Iterator[Problem]:
    if constructor is None:
        names: list[str] = []
        required: list[str] = []
    elif isinstance(constructor, ast.FunctionDef) and not constructor.decorator_list:
        taken = constructor.args
        if taken.kwarg is not None or taken.posonlyargs[1:]:
            return
        plain = [*taken.posonlyargs, *taken.args][1:]
        names = [argument.arg for argument in [*plain, *taken.kwonlyargs]]
        required = [argument.arg for argument in plain[: len(plain) - len(taken.defaults)]]
        required += [a.arg for a, default in zip(taken.kwonlyargs, taken.kw_defaults, strict=True) if default is None]
    else:
        return
    for name in arguments:
        if name not in names:
            takes = nearest(name, names) or f"; it takes {', '.join(names) or 'none'}"
            yield Problem(f"task.{name}", f"is no argument of {class_name}{takes}")
    for name in required:
        if name not in arguments:
            yield Problem(f"task.{name}", f"is required by {class_name}, and missing")


def _names_bound(body: list[ast.stmt]) -> dict[str, ast.AST]:
    """The names that a body binds, each with the node that does it last; '*' for a star import."""
    bound: dict[str, ast.AST] = {}
    for statement in body:
        for node in _own_nodes(statement):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                bound[node.name] = node
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound[node.id] = node
            elif isinstance(node, ast.alias):
                bound[node.asname or node.name.partition(".")[0]] = node
    return bound


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """A statement and what is in it (the branches of an `if`, say), but not what functions and classes in it hold."""
    yield node
    if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _own_nodes(child)
