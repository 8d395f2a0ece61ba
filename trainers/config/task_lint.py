"""A static check of a user's task: its class, methods and arguments are looked up in the source, which is not run.

Whatever the source does not show (base classes, decorators, imports) is assumed to be correct. Errors there appear when
the task is built.
"""

from __future__ import annotations

import ast
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from orchestray.platform.config.paths import is_file_type
from orchestray.platform.config.problems import Problem, nearest
from orchestray.platform.usercode.class_names import in_a_cell
from orchestray.trainers.tasks.registry import TASKS

METHODS = {
    "build_model": "build_model()",
    "dataset": "dataset(split)",
    "to_batch": "to_batch(columns)",
    "loss": "loss(outputs, batch)",
    "metrics": "metrics(outputs, batch)",
}
"""Methods that a task must have, with their calls as shown in messages."""

_MAX_KEPT = 16
"""Texts of files whose trees are kept: a search checks its base with each value of its space."""
_MODULE = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")


def problems_of(task_type: str, arguments: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problems of a task that is not built in.

    Args:
        task_type: the config's `task.type`; a file in it must be an absolute path.
        arguments: arguments of the task's constructor.
    """
    place, colon, class_name = task_type.rpartition(":")
    if not colon:
        there_are = f'built in are {", ".join(sorted(TASKS))}; your own is "path/to/file.py:Class" or "module:Class"'
        yield Problem("task.type", f"there is no task {task_type!r}{nearest(task_type, TASKS)} ({there_are})")
    elif not class_name.isidentifier():
        yield Problem("task.type", f"must end with the name of a class after the colon, got {task_type!r}")
    elif is_file_type(task_type):
        yield from _file_problems(Path(place), class_name, arguments)
    elif place == "__main__":
        yield Problem("task.type", in_a_cell(class_name))
    elif not _MODULE.match(place):
        yield Problem("task.type", f'must be "path/to/file.py:Class" or "package.module:Class", got {task_type!r}')


def module_problems(task_type: str, arguments: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problems of a task in a module on this process's import path, without importing the module.

    Call it only for tasks that will run on this machine: the workers of a cluster may have other modules.
    """
    place, colon, class_name = task_type.rpartition(":")
    if not colon or is_file_type(task_type) or not _MODULE.match(place) or place in sys.modules:
        return
    folders: Sequence[str] | None = None
    file = None
    for depth, part in enumerate(parts := place.split("."), start=1):
        try:
            found = _found(".".join(parts[:depth]), folders)
        except KeyError:  # a namespace package inside one that is not imported: it cannot be checked statically
            return
        if found is None:
            yield _no_module(part, ".".join(parts[: depth - 1]), folders)
            return
        file = found.origin if found.has_location else None
        folders = list(found.submodule_search_locations or [])
    if file is not None and file.endswith(".py"):
        yield from _file_problems(Path(file), class_name, arguments)


def _found(name: str, folders: Sequence[str] | None) -> ModuleSpec | None:
    """Find a module in the folders of its package; without a package, on the path that a worker would search."""
    for finder in sys.meta_path:
        spec = finder.find_spec(name, folders)
        if spec is not None:
            return spec
    return PathFinder.find_spec(name, [str(Path.cwd())]) if folders is None else None


def _no_module(name: str, package: str, folders: Sequence[str] | None) -> Problem:
    there_are = pkgutil.iter_modules([str(Path.cwd()), *sys.path] if folders is None else folders)
    hint = nearest(name, [module.name for module in there_are])
    if package:
        return Problem("task.type", f"there is no module {name} in {package}{hint}")
    return Problem(
        "task.type",
        f"there is no module {name} here{hint}; install it, put its folder on PYTHONPATH, or name the file: "
        '"path/to/file.py:Class"',
    )


def lower_is_better(task_type: str) -> tuple[str, ...] | None:
    """Return the metrics that a user's task lists as better when lower, without importing it.

    Args:
        task_type: the config's `task.type`; a file in it must be an absolute path.

    Returns:
        The literal value of its attribute `lower_is_better`; None if its source does not show one.
    """
    place, colon, class_name = task_type.rpartition(":")
    if not colon:
        return None
    if is_file_type(task_type):
        return _listed(Path(place), class_name)
    if place in sys.modules:
        return _as_names(getattr(getattr(sys.modules[place], class_name, None), "lower_is_better", None))
    file = _module_file(place) if _MODULE.match(place) else None
    return None if file is None else _listed(file, class_name)


def _listed(file: Path, class_name: str) -> tuple[str, ...] | None:
    """Return the literal `lower_is_better` of a class in a file, or of its bases there."""
    tree, _ = _parsed(file)
    bound: dict[str, ast.AST] = {} if tree is None else _names_bound(tree.body)
    while isinstance(node := bound.pop(class_name, None), ast.ClassDef):
        for statement in ast.walk(node):
            targets = statement.targets if isinstance(statement, ast.Assign) else []
            if isinstance(statement, ast.AnnAssign):
                targets = [statement.target]
            if any(_name_of(target) == "lower_is_better" for target in targets):
                try:
                    return _as_names(ast.literal_eval(getattr(statement, "value", None) or ast.Constant(None)))
                except ValueError:
                    return None
        class_name = next((base.id for base in node.bases if isinstance(base, ast.Name)), "")
    return None


def _name_of(target: ast.expr) -> str | None:
    """Return the name of a variable or an attribute that is assigned."""
    return target.id if isinstance(target, ast.Name) else target.attr if isinstance(target, ast.Attribute) else None


def _as_names(value: object) -> tuple[str, ...] | None:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple | set | frozenset):
        return None
    return tuple(name for name in value if isinstance(name, str))


def _module_file(place: str) -> Path | None:
    """Return the file of a module on this process's import path; None if there is none to be read."""
    folders: Sequence[str] | None = None
    found = None
    for depth in range(1, place.count(".") + 2):
        try:
            found = _found(".".join(place.split(".")[:depth]), folders)
        except (KeyError, ValueError):
            return None
        if found is None:
            return None
        folders = list(found.submodule_search_locations or [])
    file = found.origin if found is not None and found.has_location else None
    return Path(file) if file is not None and file.endswith(".py") else None


def metric_names(task_type: str) -> list[str] | None:
    """Return the metrics of a user's task in a file, if its `metrics` returns dicts with literal keys; else None."""
    place, _, class_name = task_type.rpartition(":")
    if not is_file_type(task_type):
        return None
    try:
        names = _metric_names(Path(place).read_bytes(), class_name)
    except (OSError, SyntaxError, ValueError):
        return None
    return None if names is None else [*names]


@lru_cache(maxsize=_MAX_KEPT)
def _metric_names(text: bytes, class_name: str) -> list[str] | None:
    node = _names_bound(_tree(text).body).get(class_name)
    if not isinstance(node, ast.ClassDef) or node.decorator_list or node.keywords:
        return None
    methods = _names_bound(node.body)
    method = methods.get("final_metrics", methods.get("metrics"))
    if not isinstance(method, ast.FunctionDef) or method.decorator_list:
        return None
    names: list[str] = []
    for statement in method.body:
        for inside in _own_nodes(statement):
            if isinstance(inside, ast.Return):
                told = inside.value
                keys = told.keys if isinstance(told, ast.Dict) else [None]
                if not all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in keys):
                    return None
                names += [str(key.value) for key in keys if isinstance(key, ast.Constant)]
    return names


def own_class_problems(key: str, name: str) -> Iterator[Problem]:
    """Yield the problems of a user's class other than a task, as far as its file shows.

    Args:
        key: key of the config that names it.
        name: "package.module:Class", or "path/to/file.py:Class" with an absolute path.
    """
    place, _, class_name = name.rpartition(":")
    if not class_name.isidentifier():
        yield Problem(key, f"must end with the name of a class after the colon, got {name!r}")
    elif place == "__main__":
        yield Problem(key, in_a_cell(class_name))
    elif is_file_type(name):
        tree, problem = _parsed(Path(place))
        if problem:
            yield Problem(key, problem)
        elif tree is not None and (missing := _missing(_names_bound(tree.body), tree, Path(place), class_name)):
            yield Problem(key, missing)


def _file_problems(file: Path, class_name: str, arguments: Mapping[str, Any]) -> Iterator[Problem]:
    tree, problem = _parsed(file)
    if problem:
        yield Problem("task.type", problem)
    elif tree is not None:
        yield from _class_problems(tree, file, class_name, arguments)


def _parsed(file: Path) -> tuple[ast.Module | None, str | None]:
    """Return the syntax tree of a file, or why there is none."""
    try:
        return _tree(file.read_bytes()), None
    except FileNotFoundError:
        return None, f"there is no file {file}"
    except OSError as error:
        return None, f"cannot read {file}: {error.strerror}"
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        return None, f"{file}{line} is no Python: {reason}"


@lru_cache(maxsize=_MAX_KEPT)
def _tree(text: bytes) -> ast.Module:
    return ast.parse(text)


def _missing(bound: Mapping[str, ast.AST], tree: ast.Module, file: Path, class_name: str) -> str | None:
    """Return that a file has no such class; None if it may have it."""
    if class_name in bound or "*" in bound or "__getattr__" in bound:
        return None
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    there = nearest(class_name, classes) or f"; it has {', '.join(classes) or 'no class at all'}"
    return f"there is no class {class_name} in {file.name}{there}"


def _class_problems(tree: ast.Module, file: Path, class_name: str, arguments: Mapping[str, Any]) -> Iterator[Problem]:
    bound = _names_bound(tree.body)
    if missing := _missing(bound, tree, file, class_name):
        yield Problem("task.type", missing)
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
    """Return the names that a body binds, each with the last node that binds it; '*' for a star import."""
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
    """Yield a node and its descendants, but not the contents of functions and classes."""
    yield node
    if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _own_nodes(child)
