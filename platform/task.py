"""The interface of a task, which defines what is learned, and the construction of a task from its class.

Nothing here imports torch or pyarrow: a process that only starts others needs a task's source, not the task.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias

from orchestray.platform.errors import OrchestrayError, TaskError
from orchestray.platform.process.alike import drawing_alike
from orchestray.platform.usercode.beside import Texts, find_code
from orchestray.platform.usercode.listed_names import problems_of_names
from orchestray.platform.usercode.own_names import import_file, without_own_names

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor, nn

    from orchestray.platform.data.source import Data
    from orchestray.trainers.config.schema import TrainSection
    from orchestray.trainers.tasks.params import TaskConfig

Batch: TypeAlias = "dict[str, Any]"
"""Named tensors, whose first dimension counts samples, or tuples, lists and dictionaries of them, also nested.

"inputs" is what the model is called with: `model(inputs)`, or `model(*inputs)` for a tuple or a list, or
`model(**inputs)` for a mapping. Tensors are moved to the model's device and precision; other values stay as they are.
"""

METHODS: Mapping[str, tuple[str, ...]] = {
    "build_model": (),
    "dataset": ("split",),
    "to_batch": ("columns",),
    "loss": ("outputs", "batch"),
    "metrics": ("outputs", "batch"),
}
"""Methods of a task, and the arguments of each."""
OPTIONAL_METHODS: Mapping[str, tuple[str, ...]] = {
    "to_training_batch": ("columns", "draws"),
    "weight": ("batch",),
    "final_metrics": ("totals",),
    "decode": ("request",),
    "encode": ("outputs",),
}
"""Methods that a task may have besides, and the arguments of each.

`to_training_batch(columns, draws)` is `to_batch` for training, with a generator of random numbers for each row.

`weight(batch)` returns the number by which the loss of a batch is divided, where that is not its number of samples:
the valid tokens, or the sum of class weights. It is not negative, and depends on the batch alone.

With `final_metrics(totals)`, `metrics` returns values that are added over the whole validation set: numbers and tensors
by their sum, lists of a tensor by concatenation along its first dimension. `final_metrics` gets the totals, and returns
the metrics.

Two are for an endpoint. `decode(request)` returns the inputs of one sample, without a batch dimension, from what a
request holds for it: a JSON value, or bytes; a ValueError tells the client what is wrong. `encode(outputs)` returns the
answer, JSON values, from the outputs of one sample: a tensor, or a mapping of several by name.
"""
OPTIONAL_ATTRIBUTES = (
    "class_names",
    "feature_names",
    "lower_is_better",
    "example_request",
    "padding",
    "padding_mask",
    "max_length",
)
"""Attributes that a task may have besides.

`class_names` has the names of the classes in the order of the outputs. `feature_names` has the names of the numbers of
the only input in their order, or maps names to how many of them each has. `lower_is_better` has the names of the
metrics that are better when lower: a literal tuple, which goals and searches read from the source. `example_request` is
a JSON value that `decode` takes, for those who look at an endpoint.

`padding` is for an endpoint, where samples of any length share a batch. It maps the names of inputs whose first
dimension, in a sample, has any length to the value with which they are padded. `padding_mask` names the one of them
that is 1 where a sample has values and 0 elsewhere, if the model takes such a mask. `max_length` is the greatest
length.
"""
OF_AN_ENDPOINT = ("decode", "encode")
"""Those of the optional methods that give requests and answers of an endpoint a form of the task's own."""
ASKED = ("step", "gather")
"""Keyword arguments that a task's `loss` gets if its signature names them.

`step` is the number of the step, from 1, also after a resumption; in a validation that of the last step. `gather(x)`
returns the tensors of all replicas for the whole batch, joined along their first dimension, for a loss between samples.
"""


OF_THE_LOSS = ("weight", "final_metrics", *ASKED)
"""Those of them by which losses and metrics are not means over samples."""


class Task(Protocol):
    """A model, its data, and the loss to minimise; a task does not depend on how the training is distributed."""

    def build_model(self) -> nn.Module:
        """Return the untrained model; torch is seeded before, so that all workers start with the same weights."""
        ...

    def dataset(self, split: str) -> Data | None:
        """Return the samples of "train" or "validation", one per row; must be the same on every worker.

        None for "validation": there is none.
        """
        ...

    def to_batch(self, columns: pa.Table) -> Batch:
        """Return rows of the dataset as tensors; depend on the rows alone. The batch may overwrite the rows' memory."""
        ...

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the mean loss over the samples of a batch, a scalar; see also `OPTIONAL_METHODS` and `ASKED`."""
        ...

    def metrics(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Return the metrics of a validation, each a mean over the samples of a batch."""
        ...


@dataclass(frozen=True)
class TaskSource:
    """The source of a task, with which a machine without the user's file can build it. Picklable, and JSON."""

    type: str
    """Built-in name, "package.module:Class", or "/absolute/path.py:Class"."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the constructor."""
    file: str | None = None
    """Absolute path of the file that contains the class, if there is one."""
    source: str | None = None
    """Text of that file."""
    modules: dict[str, str] = field(default_factory=dict)
    """Texts of the modules beside that file that it imports, by absolute path."""
    quantize: dict[str, Any] | None = None
    """Keys of the run's `train.quantize`, by which the model that the task builds is changed; None: it stays."""
    ensemble: dict[str, Any] | None = None
    """Keys of the run's `train.ensemble`, by which several of its models become one; None: there is one."""

    @property
    def texts(self) -> dict[str, str]:
        """Texts of the user's files, by absolute path; empty for a task in a module, or a built-in one."""
        return {} if self.file is None else {self.file: self.source or "", **self.modules}

    @classmethod
    def from_config(cls, task: TaskConfig, train: TrainSection | None = None) -> Self:
        """Return the source of a config's task, with the text of its file and of the modules beside it.

        Args:
            task: the section.
            train: the section `train`, whose `quantize` and `ensemble` change the model; None: it stays.

        Raises:
            TaskError: the file cannot be read.
        """
        source = cls.of_class(task.type, task.arguments)
        if train is None:
            return source
        quantize, ensemble = (None if each is None else each.model_dump() for each in (train.quantize, train.ensemble))
        return replace(source, quantize=quantize, ensemble=ensemble)

    @classmethod
    def of_class(
        cls, name: str, arguments: Mapping[str, Any], *, noun: str = "task", known: Mapping[str, str] | None = None
    ) -> Self:
        """Return the source of a class, with the text of its file, and of the modules beside that, if it is in one.

        Args:
            name: "package.module:Class", "path/to/file.py:Class", or a name without a colon.
            arguments: arguments of its constructor.
            noun: what the class is, for messages.
            known: texts of files by absolute path, which need not be there.

        Raises:
            TaskError: the file or a module cannot be read, or the modules are too large.
        """
        place, _, _ = name.rpartition(":")
        if not (place.endswith(".py") or "/" in place):
            return cls(name, dict(arguments), None, None)
        file = Path(place).absolute()
        texts = Texts(known or {})
        try:
            text = texts.read(file)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise TaskError(f"cannot read the {noun} file {file}: {reason}") from error
        if text is None:
            raise TaskError(f"cannot read the {noun} file {file}: No such file or directory")
        return cls(name, dict(arguments), str(file), text, find_code(file, text, texts).beside)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the source from the output of `to_json`.

        Raises:
            TaskError: the data has another form.
        """
        try:
            modules = dict(data.get("modules", {}))  # runs of before 0.2 have none
            return cls(
                str(data["type"]),
                dict(data["arguments"]),
                data.get("file"),
                data.get("source"),
                modules,
                data.get("quantize"),
                data.get("ensemble"),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise TaskError(f"the description of the task is damaged: it lacks or garbles {error}") from error


def build_task(source: TaskSource, builtin: Callable[[str], type] | None = None) -> Task:
    """Load a task's class and call it with its arguments.

    Args:
        source: source of the class, and its arguments.
        builtin: returns the class of a built-in name; raises TaskError for an unknown name.

    Raises:
        TaskError: the class does not import, is missing, lacks a method, or refuses its arguments.
    """
    task_class = _load_class(source, builtin)
    _check_arguments(task_class, source.arguments)
    try:
        with drawing_alike():
            task: Task = task_class(**source.arguments)
    except OrchestrayError:
        raise
    except Exception as error:
        raise TaskError(f"{_name(task_class)}({_shown(source.arguments)}) failed: {cause_of(error)}") from error
    validate(task)
    return task


def validate(task: object) -> None:
    """Check that an object has the five methods of a task, that each accepts the arguments it will get, and its names.

    Raises:
        TaskError: names every method that is missing or has other parameters, and every attribute that is not a list.
    """
    problems = []
    for name, wanted in METHODS.items():
        method = getattr(task, name, None)
        call = f"{name}({', '.join(wanted)})"
        if not callable(method):
            problems.append(f"class {_name(type(task))} lacks method '{call}'")
        elif not _takes(method, wanted):
            takes = inspect.signature(method)
            problems.append(f"class {_name(type(task))}: {name}{takes} must be callable as '{call}'")
    for name, wanted in OPTIONAL_METHODS.items():
        method = getattr(task, name, None)
        if method is not None and not (callable(method) and _takes(method, wanted)):
            problems.append(f"class {_name(type(task))}: {name} must be callable as '{name}({', '.join(wanted)})'")
    problems += [f"class {_name(type(task))}: {problem}" for problem in problems_of_names(task)]
    if problems:
        raise TaskError("\n".join(problems))


def training_batch_of(task: Task) -> Callable[[pa.Table, Sequence[Any]], Batch] | None:
    """Return a task's `to_training_batch`, which makes the batches to train on; None if it has none."""
    method: Callable[[pa.Table, Sequence[Any]], Batch] | None = getattr(task, "to_training_batch", None)
    return method


def asked_by(task: Task) -> tuple[str, ...]:
    """Return those of `ASKED` that a task's `loss` asks for; for a task around another one, those of the other one."""
    inner = getattr(task, "asks_as", None)
    return _asked_by_class(type(task)) if inner is None else asked_by(inner)


@functools.cache
def _asked_by_class(task_class: type) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(getattr(task_class, "loss", None)).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):  # without one, or written in C
        return ()
    return tuple(name for name in ASKED if name in parameters)


def load_class(source: TaskSource, *, key: str = "task.type") -> type:
    """Return the class that a source names, in a module or in the text of a file; it need not be a task.

    Args:
        source: source of the class.
        key: key of the config that names it, for messages.

    Raises:
        TaskError: the class does not import, or is missing.
    """
    found: type = _load_class(source, None, key)
    return found


def load_object(source: TaskSource, *, key: str) -> Any:
    """Return the class, function or other object that a source names; arguments and errors are as of `load_class`."""
    return _load_class(source, None, key, also_objects=True)


def _load_class(
    source: TaskSource,
    builtin: Callable[[str], type] | None,
    key: str = "task.type",
    *,
    also_objects: bool = False,
) -> Any:
    place, colon, class_name = source.type.rpartition(":")
    if not colon:
        if builtin is None:
            raise TaskError(f'{source.type!r} names no class: wanted "path/to/file.py:Class" or "module:Class"')
        return builtin(source.type)
    module = _import_module(place, key) if source.file is None else _import_file(source.file, source)
    found = getattr(module, class_name, None)
    if isinstance(found, type) or (also_objects and found is not None):
        return found
    where = source.file or f"module {place}"
    if found is not None:
        raise TaskError(f"{class_name} in {where} is no class but a {type(found).__name__}")
    classes = [n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__]
    raise TaskError(f"there is no class {class_name} in {where}{_nearest(class_name, classes)}")


def _import_module(name: str, key: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise TaskError(
                f"there is no module {name} for {key}: install it where the workers run, put its folder on "
                'PYTHONPATH, or name the file: "path/to/file.py:Class"'
            ) from error
        raise TaskError(f"module {name} does not import: {cause_of(error)}") from error
    except (Exception, SystemExit) as error:
        raise TaskError(f"module {name} does not import: {cause_of(error)}") from error


def _import_file(path: str, source: TaskSource) -> ModuleType:
    """Run a file's text as a module, as if imported from its path."""
    try:
        return import_file(path, source.source or "", source.modules)
    except (Exception, SystemExit) as error:
        if isinstance(error, OrchestrayError):
            raise
        cause = cause_of(error, {path, *source.modules})
        raise TaskError(f"the file {path} does not import: {cause}") from error


def _check_arguments(task_class: type, arguments: Mapping[str, Any]) -> None:
    """Compare the given arguments with the constructor's parameters, before it runs."""
    try:
        parameters = inspect.signature(task_class).parameters.values()
    except (TypeError, ValueError):
        return  # written in C: it reports wrong arguments itself
    names = [p.name for p in parameters if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    problems = [
        f"task.{name}: is no argument of {_name(task_class)}{_nearest(name, names) or '; it takes none'}"
        for name in arguments
        if name not in names and not takes_any
    ]
    problems += [
        f"task.{p.name}: is required by {_name(task_class)}, and missing"
        for p in parameters
        if p.default is p.empty and p.name in names and p.name not in arguments
    ]
    if problems:
        raise TaskError("\n".join(problems))


def _takes(method: Callable[..., Any], arguments: tuple[str, ...]) -> bool:
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return True
    asked = ASKED if arguments == METHODS["loss"] else ()
    try:
        signature.bind(*arguments, **dict.fromkeys(name for name in asked if name in signature.parameters))
    except TypeError:
        return False
    return True


def cause_of(error: BaseException, files: Collection[str] = ()) -> str:
    """Return an exception as a clause: type, text, and the file and line where the user's own code raised it.

    Args:
        error: exception.
        files: the user's files; empty: any but this one.
    """
    said = without_own_names(str(error))
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<")]
    own = [f for f in frames if (f.filename in files if files else f.filename != __file__)]
    return f"{text} ({own[-1].filename}, line {own[-1].lineno})" if own else text


def _nearest(name: str, there: list[str]) -> str:
    close = get_close_matches(name, there, n=1)
    if close:
        return f" (did you mean '{close[0]}'?)"
    return f"; it has {', '.join(there)}" if there else ""


def _name(task_class: type) -> str:
    return task_class.__qualname__


def _shown(arguments: Mapping[str, Any]) -> str:
    text = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return text if len(text) <= 80 else text[:77] + "..."
