"""A model that is a class or a function of the user's own: anything that answers a batch. Does not import torch."""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Any

import numpy as np

from orchestray.platform.errors import OrchestrayError, TaskError
from orchestray.platform.task import TaskSource, cause_of, load_object
from orchestray.platform.usercode.listed_names import listed_names
from orchestray.serving.models.content import check_source
from orchestray.serving.models.errors import ModelError, RequestError, reason_of, run_isolated
from orchestray.serving.models.json_values import as_numpy, json_values, times
from orchestray.serving.models.signature import ANY, Answers, Sample, Signature, Tensors, TensorSpec, boxed

_MOST_BYTES = 8
"""Largest number that the protocols have a type for."""


def load_own_model(
    run: str,
    arguments: Mapping[str, Any],
    *,
    name: str,
    version: str = "1",
    num_threads: int = 1,
    content: str = "",
) -> OwnModel:
    """Make a model of a class or a function of the user's own, and have it answer its example, if it has one.

    Args:
        run: `path/to/file.py:Class`; or an object with `predict`, or a function, which is called with the batch.
        arguments: arguments of the class.
        name, version: name and version in requests.
        num_threads: CPU threads of a call, if the model uses torch.
        content: result of `content_of` for the class when the version started; empty: not checked.

    Raises:
        TaskError: the class does not import, refuses its arguments, lacks `predict`, does not answer its example, or
            has been edited since.
    """
    files: Collection[str] = ()
    try:
        source = TaskSource.of_class(run, arguments, noun="model")
        files = source.texts
        check_source(source, content)
        predict, made = _made(source)
        return OwnModel(predict, made, name=name, version=version, num_threads=num_threads)
    except OrchestrayError as error:
        raise type(error)(f"{run} cannot be served: {error}") from error
    except (Exception, SystemExit) as error:
        raise TaskError(f"{run} cannot be served: {cause_of(error, files)}") from error


def _made(source: TaskSource) -> tuple[Callable[[Any], Any], Any]:
    """Return what answers a batch, and the object whose method it is, or itself."""
    found: Any = load_object(source, key="models.run")
    is_class = isinstance(found, type)
    if source.arguments and not is_class:
        raise TaskError("it is no class, and takes no arguments; leave them out")
    made = found(**source.arguments) if is_class else found
    is_network = "torch" in sys.modules and isinstance(made, sys.modules["torch"].nn.Module)
    predict = getattr(made, "predict", None if is_class or is_network else made)
    if not callable(predict):
        how = ": it makes a tensor of the batch, and calls the network on it" if is_network else ""
        raise TaskError(
            f"{type(made).__name__} lacks the method predict(batch), which returns an answer for each sample{how}"
        )
    _check_takes_a_batch(predict)
    return predict, made


def _check_takes_a_batch(predict: Callable[[Any], Any]) -> None:
    """Check what would fail with every request: a model without an example answers none at its start."""
    for function in (predict, type(predict).__call__):
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise TaskError("predict is async, and a batch has a thread of its own: write `def`")
    try:
        takes = inspect.signature(predict)
    except (TypeError, ValueError):
        return  # of C code, it shows none
    try:
        takes.bind([])
    except TypeError:
        raise TaskError(f"predict{takes} must be callable as 'predict(batch)'") from None


class OwnModel:
    """A model that is an object with `predict(batch)`.

    Its method `example_inputs()` returns one sample: an array, or a mapping of several by name. What comes is then
    checked, and `batch` is an array, [samples, ...], or a mapping of them. Without it, `batch` is a list of the JSON
    values that were sent, whatever they are. It returns an answer for each sample: an array or a tensor, [samples,
    ...], a mapping of those by name, or a list of JSON values. Its `ValueError` is the client's fault, and the text of
    it goes to the client.

    Args:
        predict: answers a batch.
        made: the object, of which `example_inputs`, `example_request` (one value as it is sent) and `class_names` are
            asked.
        name, version: name and version in requests.
        num_threads: CPU threads of a call, if the model uses torch.

    Raises:
        TaskError: it does not answer its example.
    """

    def __init__(
        self, predict: Callable[[Any], Any], made: Any, *, name: str, version: str = "1", num_threads: int = 1
    ) -> None:
        self._predict, self._num_threads = predict, num_threads
        self.num_in_flight = 1
        inputs, example = _interface(made)
        names = tuple(json_values(listed_names(getattr(made, "class_names", None))))
        anything = (TensorSpec("outputs", ANY, ()),)
        self.signature = Signature(name, version, inputs, anything, example, class_names=names)
        if example is None:
            return
        try:
            (first,) = self._answers([self.signature.parse(example)])
        except (Exception, SystemExit) as error:
            cause = error.__cause__ if isinstance(error, RequestError) else error
            why = str(error) if isinstance(error, ModelError) else cause_of(cause or error)
            raise TaskError(f"it does not answer its example: {why}") from error
        if inputs[0].dtype != ANY:
            outputs = tuple(TensorSpec(key, str(value.dtype), value.shape) for key, value in first.items())
            self.signature = Signature(name, version, inputs, outputs, example, class_names=names)

    def pin_threads(self) -> None:
        """Set torch's number of threads in the calling thread, if the model uses torch."""
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(self._num_threads)

    def run(self, samples: Sequence[Sample]) -> Answers:
        """Return an answer for each sample, or a `RequestError` or `ModelError` where the model raises."""
        return run_isolated(self.signature.name, self._answers, samples)

    def _answers(self, samples: Sequence[Sample]) -> list[Tensors]:
        specs = self.signature.inputs
        if specs[0].dtype == ANY:
            values = [sample[specs[0].name].item() for sample in samples]
            batch = pickle.loads(pickle.dumps(values))  # noqa: S301 - a copy, which it may change
        else:
            stacked = {spec.name: np.stack([sample[spec.name] for sample in samples]) for spec in specs}
            batch = stacked if len(specs) > 1 else stacked[specs[0].name]
        answered = self._asked(batch, len(samples))
        columns = _by_column(answered)
        found = {"outputs": answered} if columns is None else columns
        rows = {name: _rows(column, len(samples)) for name, column in found.items()}
        answers = [{name: column[row] for name, column in rows.items()} for row in range(len(samples))]
        if specs[0].dtype != ANY:
            return [{name: _array(value) for name, value in answer.items()} for answer in answers]
        return [{"outputs": boxed(json_values(answer["outputs"] if columns is None else answer))} for answer in answers]

    def _asked(self, batch: Any, num_samples: int) -> Any:
        try:
            answered = self._predict(batch)
            is_generator = inspect.isgenerator(answered)  # whose errors come when it is read
            return list(islice(answered, num_samples + 1)) if is_generator else answered
        except ValueError as error:
            raise RequestError(reason_of(error)) from error


def _interface(made: Any) -> tuple[tuple[TensorSpec, ...], Any]:
    """Return the inputs of a model, and one sample as JSON values, or None."""
    own = getattr(made, "example_inputs", None)
    if own is None:
        return (TensorSpec("inputs", ANY, ()),), json_values(getattr(made, "example_request", None))
    example = own()
    named = example if isinstance(example, Mapping) else {"inputs": example}
    arrays = {str(name): np.asarray(as_numpy(value)) for name, value in named.items()}
    specs = tuple(TensorSpec(name, str(array.dtype), array.shape) for name, array in arrays.items())
    if wrong := [str(spec) for spec in specs if not _is_number(spec.numpy_dtype)] or ["none"][len(specs) :]:
        raise TaskError(f"example_inputs() must return numbers or arrays of them, got {wrong[0]}")
    values = {name: array.tolist() for name, array in arrays.items()}
    return specs, values if len(values) > 1 else next(iter(values.values()))


def _by_column(answered: Any) -> Mapping[str, Any] | None:
    """Return a model's answer as arrays by name, if it is a mapping of them or a data frame; else None.

    Raises:
        ModelError: it is a tuple of arrays, of which each might be an output, or an answer to one sample.
    """
    if hasattr(answered, "_asdict"):  # a named tuple
        answered = answered._asdict()
    if isinstance(answered, tuple) and any(np.ndim(as_numpy(each)) for each in answered if not _is_json(each)):
        raise ModelError(
            "predict returned a tuple of arrays: return a mapping of them by name for several outputs, or a list with "
            "an answer for each sample"
        )
    if hasattr(answered, "columns") and hasattr(answered, "to_dict"):  # of pandas: iterated over, it gives names
        found = {str(name): answered[name] for name in answered.columns}  # of a name that two have, a frame of both
        return {name: each.to_numpy() if hasattr(each, "columns") else as_numpy(each) for name, each in found.items()}
    if not isinstance(answered, Mapping) or not answered:
        return None
    return {str(name): value for name, value in answered.items()}


def _is_json(value: Any) -> bool:
    return isinstance(value, str | bytes | list | tuple | Mapping | AbstractSet)


def _rows(column: Any, num_samples: int) -> Sequence[Any]:
    """Return the answers of a batch.

    Raises:
        ModelError: there are more or fewer than samples.
    """
    column = as_numpy(column)
    rows: Any = None
    if isinstance(column, np.ndarray):
        rows = column if column.ndim else None
        if column.dtype.kind == "M":
            rows = times(column)
    elif hasattr(column, "__iter__") and not isinstance(column, str | bytes | Mapping | AbstractSet):
        rows = list(islice(column, num_samples + 1))
    if rows is None or len(rows) != num_samples:
        got = f"a {type(column).__name__}" if rows is None else "more" if len(rows) > num_samples else f"{len(rows)}"
        raise ModelError(f"predict must return an answer for each of the {num_samples} samples, and returned {got}")
    found: Sequence[Any] = rows
    return found


def _array(value: Any) -> np.ndarray[Any, Any]:
    """Return an answer as an array of its own; one that is not of numbers is any JSON value."""
    value = as_numpy(value)
    is_plain = isinstance(value, np.ndarray | np.generic | int | float) and not np.ma.is_masked(value)
    array = np.array(value) if is_plain else None  # which would show what a mask hides
    return array if array is not None and _is_number(array.dtype) else boxed(json_values(value))


def _is_number(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "fiub" and dtype.itemsize <= _MOST_BYTES
