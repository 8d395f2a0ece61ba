"""The interface of a trained model: an example of its inputs, names, and the metrics that are better when lower.

It is written with the model, so that the model is served where its training data is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orchestray.platform.data.nested import map_tensors, tensors_in
from orchestray.platform.data.source import first_row
from orchestray.platform.errors import CheckpointError, OrchestrayError, TaskError
from orchestray.platform.run.model_files import EXAMPLE_FILE, load_beside, load_model_json
from orchestray.platform.task import OF_AN_ENDPOINT
from orchestray.platform.usercode.listed_names import feature_counts, listed_names, lower_names
from orchestray.trainers.core.inputs import InputForm, described, inputs_of

if TYPE_CHECKING:
    import os

    import pyarrow as pa

    from orchestray.platform.task import Task

INTERFACE = "interface"
"""Key of a model's interface in `model.json`."""


@dataclass(frozen=True)
class Interface:
    """A trained model from the point of view of those who call it.

    Attributes:
        example: one sample's inputs, without the batch dimension: a tensor, or a tuple or a mapping of several; None:
            there is none.
        no_example: the reason why there is none.
        class_names: names of the classes, in the order of the outputs; empty: unknown, or there are no classes.
        feature_names: maps the names of the numbers of the only input, in order, to how many each has; empty: unknown.
        lower_is_better: names of the metrics that are better when lower, the loss first.
        own_forms: those of the methods `decode` and `encode` that the task has.
        example_request: a JSON value that `decode` takes; None: unknown.
        padding: maps the inputs of variable length to the value with which their first dimension is padded.
        padding_mask: the one of them that is 1 where a sample has values and 0 where it is padded; None: there is none.
        max_length: greatest length; None: any.
    """

    example: Any = None
    no_example: str = ""
    class_names: tuple[Any, ...] = ()
    feature_names: Mapping[str, int] = field(default_factory=dict)
    lower_is_better: tuple[str, ...] = ("loss",)
    own_forms: tuple[str, ...] = ()
    example_request: Any = None
    padding: Mapping[str, float] = field(default_factory=dict)
    padding_mask: str | None = None
    max_length: int | None = None

    @classmethod
    def of_task(cls, task: Task, row: Callable[[], pa.Table] | None = None) -> Interface:
        """Return the interface of a task's model.

        Args:
            task: the task; see `OPTIONAL_ATTRIBUTES`.
            row: returns the first row of the training data; default: the data is opened.
        """
        names = listed_names(getattr(task, "class_names", None))
        lower = lower_names(getattr(task, "lower_is_better", None))
        example, problem = None, ""
        try:
            example = example_of(task, row)
            _form(example, [])
        except OrchestrayError as error:
            example, problem = None, str(error)
        forms = tuple(name for name in OF_AN_ENDPOINT if getattr(task, name, None) is not None)
        request = getattr(task, "example_request", None) if "decode" in forms else None
        own = cls(example, problem, tuple(names), _feature_names(task), ("loss", *lower), forms, request)
        if not (padding := dict(getattr(task, "padding", None) or {})):
            return own
        mask, most = (getattr(task, key, None) for key in ("padding_mask", "max_length"))
        return replace(own, padding=padding, padding_mask=mask, max_length=most)

    def to_json(self) -> dict[str, Any]:
        """Return the interface as JSON values; the tensors of the example are in `tensors`."""
        plain = {
            "class_names": list(self.class_names),
            "feature_names": dict(self.feature_names),
            "lower_is_better": list(self.lower_is_better),
            "own_forms": list(self.own_forms),
            "example_request": self.example_request,
            **({"padding": self._padding_to_json()} if self.padding else {}),
        }
        if self.example is None:
            return {"no_example": self.no_example, **plain}
        given = InputForm(self.example)
        inputs = [
            {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
            for name, tensor in zip(given.names, given.tensors(self.example), strict=True)
        ]
        return {"inputs": inputs, "example": _form(self.example, []), **plain}

    def _padding_to_json(self) -> dict[str, Any]:
        return {"padding": dict(self.padding), "padding_mask": self.padding_mask, "max_length": self.max_length}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the example by their index; empty without one."""
        found: list[Tensor] = []
        if self.example is not None:
            _form(self.example, found)
        return {str(index): tensor.detach().cpu().contiguous() for index, tensor in enumerate(found)}


def read_interface(directory: str | os.PathLike[str]) -> Interface | None:
    """Return the interface that was written with a model; None: the model is older than interfaces.

    Raises:
        CheckpointError: the model is missing or damaged.
    """
    written = load_model_json(directory).get(INTERFACE)
    if written is None:
        return None
    try:
        example = _example(written["example"], load_beside(directory, EXAMPLE_FILE)) if "example" in written else None
        names, lower = tuple(written["class_names"]), tuple(written["lower_is_better"])
        features = dict(written.get("feature_names", {}))
        forms = tuple(written.get("own_forms", ()))
        padding = dict(written.get("padding", {}))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the interface in the model.json of {directory} is damaged: {error!r}") from error
    request = written.get("example_request")
    return Interface(example, written.get("no_example", ""), names, features, lower, forms, request, **padding)


def saved_interface(directory: str | os.PathLike[str], load_task: Callable[[], Task]) -> Interface:
    """Return the interface that was written with a model, or that its task shows; it has an example.

    Args:
        directory: folder of the model.
        load_task: builds the task of a model that is older than interfaces, or than names of features in them.

    Raises:
        TaskError: there is none.
        CheckpointError: the model is missing or damaged.
    """
    written = read_interface(directory)
    if written is None:
        written = Interface.of_task(load_task())
    elif "feature_names" not in load_model_json(directory)[INTERFACE]:
        written = replace(written, feature_names=_feature_names(load_task()))
    if written.example is None:
        raise TaskError(written.no_example)
    return written


def saved_example(directory: str | os.PathLike[str], load_task: Callable[[], Task]) -> Any:
    """Return the example of `saved_interface`; raises the same."""
    return saved_interface(directory, load_task).example


def _feature_names(task: Task) -> dict[str, int]:
    return feature_counts(getattr(task, "feature_names", None))


def example_of(task: Task, row: Callable[[], pa.Table] | None = None) -> Any:
    """Return one sample's inputs, without the batch dimension: the task's own example, or the first row of its data.

    Several inputs are in a tuple or a mapping, as in the task's batches.

    Args:
        task: the task.
        row: returns the first row of the training data; default: the data is opened.

    Raises:
        TaskError: it has neither, or an input does not count samples.
    """
    own: Any = getattr(task, "example_inputs", None)  # an optional method of a task
    if own is not None:
        return _as_tensors(own())
    try:
        inputs = inputs_of(task.to_batch(first_row(task) if row is None else row()))
    except Exception as error:
        raise TaskError(
            "the task has no example_inputs(), and its data cannot be read here "
            f"({type(error).__name__}: {error}): add example_inputs() to the task"
        ) from error
    if any(tensor.dim() == 0 or len(tensor) != 1 for tensor in tensors_in(inputs)):
        raise TaskError(
            f"the task's inputs for one sample are {described(inputs)}; to be served, the first dimension of each "
            "tensor must count the samples"
        )
    return map_tensors(lambda tensor: tensor[0], inputs)


def _as_tensors(example: Any) -> Any:
    """Return an example with tensors instead of numbers, arrays and lists of numbers."""
    if isinstance(example, Mapping):
        return {name: _as_tensors(value) for name, value in example.items()}
    if isinstance(example, tuple) and not all(isinstance(value, int | float) for value in example):
        return tuple(_as_tensors(value) for value in example)
    return torch.as_tensor(example)


def _form(example: Any, found: list[Tensor]) -> dict[str, Any]:
    """Return the containers of an example as JSON values, with the indices of its tensors, which `found` collects.

    Raises:
        TaskError: it holds something that JSON cannot.
    """
    if isinstance(example, Tensor):
        found.append(example)
        return {"tensor": len(found) - 1}
    if isinstance(example, Mapping):
        return {"mapping": {str(name): _form(value, found) for name, value in example.items()}}
    if type(example) in (tuple, list):
        return {type(example).__name__: [_form(value, found) for value in example]}
    if example is None or isinstance(example, bool | int | float | str):
        return {"value": example}
    raise TaskError(
        f"the inputs of the task hold a {type(example).__name__}: to be served, they must be tensors, in tuples, lists "
        "and mappings, beside numbers and texts"
    )


def _example(form: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """Return the example of a form that `_form` returned."""
    ((kind, content),) = form.items()
    match kind:
        case "tensor":
            return tensors[str(content)]
        case "mapping":
            return {name: _example(value, tensors) for name, value in content.items()}
        case "tuple":
            return tuple(_example(value, tensors) for value in content)
        case "list":
            return [_example(value, tensors) for value in content]
        case _:
            return content
