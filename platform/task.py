"""What is learned: the contract of a task, and how one is built from its name."""

from __future__ import annotations

import importlib
import linecache
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from orchestray.platform.errors import OrchestrayError, TaskError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as ds
    from torch import Tensor, nn

    from orchestray.platform.config.tasks import TaskConfig

    Batch = dict[str, Tensor]

METHODS = {
    "build_model": "build_model()",
    "dataset": "dataset(split)",
    "to_batch": "to_batch(columns)",
    "loss": "loss(outputs, batch)",
    "metrics": "metrics(outputs, batch)",
}
"""The methods every task has, as its author writes them."""


class Task(Protocol):
    """What is learned, free of how it is parallelised."""

    def build_model(self) -> nn.Module:
        """The model; random numbers are seeded before the call, so every worker builds the same."""

    def dataset(self, split: str) -> pa.Table | ds.Dataset:
        """The rows of "train" or "validation"."""

    def to_batch(self, columns: pa.Table) -> Batch:
        """Some rows as tensors by name; "inputs" is what the model is called with."""

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """The mean over the samples, a scalar."""

    def metrics(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Each a mean over the samples."""


@dataclass(frozen=True)
class TaskSource:
    """What a task is built from, as plain data that any process can use: a worker elsewhere needs no file."""

    type: str
    """Built-in name, "package.module:Class" or "path/to/file.py:Class"."""
    arguments: dict[str, Any] = field(default_factory=dict)
    file: str | None = None
    """Absolute path of the task's file, if it has one."""
    source: str | None = None
    """Text of that file."""

    @staticmethod
    def from_config(task: TaskConfig) -> TaskSource:
        """Read the task's file, if it is in one.

        Raises:
            TaskError: the file cannot be read.
        """
        path, _, class_name = task.type.rpartition(":")
        if not class_name or not path.endswith(".py"):
            return TaskSource(task.type, task.arguments)
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TaskError(f"The task file {path} cannot be read: {error}") from error
        return TaskSource(task.type, task.arguments, str(Path(path).absolute()), text)

    def to_json(self) -> dict[str, Any]:
        """As JSON values, for `model.json`."""
        return {"type": self.type, "arguments": self.arguments, "file": self.file, "source": self.source}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> TaskSource:
        return TaskSource(value["type"], dict(value["arguments"]), value.get("file"), value.get("source"))


def build_task(source: TaskSource, builtin: Callable[[str], type]) -> Task:
    """Build a task.

    Args:
        source: which, and from what.
        builtin: the class of a built-in name; raises KeyError if there is none.

    Raises:
        TaskError: it does not import, lacks a method, or refuses its arguments; the text says which and where.
    """
    task_class = _task_class(source, builtin)
    for name, shown in METHODS.items():
        if not callable(getattr(task_class, name, None)):
            raise TaskError(
                f"The task {source.type} lacks the method {shown}. A task has {', '.join(METHODS.values())}."
            )
    try:
        task: Task = task_class(**source.arguments)
    except OrchestrayError:
        raise
    except TypeError as error:
        raise TaskError(
            f"The task {source.type} refuses its arguments: {error}. Correct the keys under `task:`."
        ) from error
    except Exception as error:
        raise TaskError(f"The task {source.type} cannot be built: {_told(error, source.file)}") from error
    return task


def _task_class(source: TaskSource, builtin: Callable[[str], type]) -> type:
    place, _, class_name = source.type.rpartition(":")
    if not place:
        try:
            return builtin(source.type)
        except KeyError as error:
            raise TaskError(f"There is no built-in task {source.type!r}.") from error
    try:
        module = _module_of_text(source) if source.source is not None else importlib.import_module(place)
    except OrchestrayError:
        raise
    except Exception as error:
        raise TaskError(f"The task {source.type} does not import: {_told(error, source.file)}") from error
    found = getattr(module, class_name, None)
    if isinstance(found, type):
        return found
    classes = [name for name, value in vars(module).items() if isinstance(value, type)]
    near = get_close_matches(class_name, classes, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise TaskError(f"There is no class {class_name!r} in {place}.{hint}")


def _module_of_text(source: TaskSource) -> types.ModuleType:
    """Run a task file's text as a module; the same text is the same module."""
    text, file = source.source or "", source.file or source.type.rpartition(":")[0]
    name = f"orchestray_task_{Path(file).stem}_{sha256((file + text).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    folder = str(Path(file).parent)
    if Path(folder).is_dir() and folder not in sys.path:
        sys.path.append(folder)  # for the modules that lie beside it
    module = types.ModuleType(name)
    module.__file__ = file
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    sys.modules[name] = module  # before it runs: dataclasses and pickling look their module up
    try:
        exec(compile(text, file, "exec"), module.__dict__)  # noqa: S102 - the user's own task
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _told(error: Exception, file: str | None) -> str:
    """An exception of the user's code: its type, text and the line of the user's file it came through last."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if file is not None and frame.filename == file]
    frame = own[-1] if own else (frames[-1] if frames else None)
    where = f"{frame.filename}, line {frame.lineno}: " if frame else ""
    return f"{where}{type(error).__name__}: {error}"
