"""A trained model as a function on batches. Imports torch."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from orchestray.platform.data.nested import map_tensors
from orchestray.platform.errors import CheckpointError
from orchestray.serving.models.any_length import AnyLength
from orchestray.serving.models.cuda_graphs import Recorded
from orchestray.serving.models.device import CudaAccelerator
from orchestray.serving.models.errors import ModelError, run_isolated
from orchestray.serving.models.padding import Padding, padded_size
from orchestray.serving.models.signature import Answers, Output, Sample, Signature, TensorSpec, boxed
from orchestray.serving.models.transfer import HostTransfer, StreamedTransfer
from orchestray.trainers.core.inputs import InputForm, call
from orchestray.trainers.core.own_gradients import wants_gradients

_log = logging.getLogger("orchestray.serving")
_MOST_NAMED = 3
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4
"""Largest difference between answers that count as one."""


class ServedModel:
    """A model that answers batches.

    Args:
        model: module in evaluation mode, called with the inputs, [samples, ...]; returns a tensor, [samples, ...], or
            several (a tuple or a mapping).
        example: one sample's inputs, without a batch dimension, which defines the types and shapes: a tensor, or a
            tuple or a mapping of several.
        name, version: name and version in requests.
        device: device of the model; default: the CPU.
        precision: `float32` (unchanged) or `bfloat16` (autocast).
        compile: True for torch.compile, with a graph for each size in `pad_to`; or the name of one of its backends.
        graphs: True to launch batches of the sizes in `pad_to` as CUDA graphs, where there is an accelerator.
        pad_to: sizes to which batches are padded, ascending; empty: no padding.
        num_threads: CPU threads of one call.
        padding: the inputs of variable length; None: every input has the shape of the example.
        accelerator: takes batches to the device and back; default: by the device.

    Attributes:
        num_in_flight: number of batches that may be run at once, each by a thread.

    Raises:
        CheckpointError: the model does not answer its example, or one of another length.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        *,
        name: str = "model",
        version: str = "1",
        device: torch.device | None = None,
        precision: str = "float32",
        compile: bool | str = False,  # noqa: A002 - as torch calls it
        graphs: bool = False,
        pad_to: Sequence[int] = (),
        num_threads: int = 1,
        padding: Padding | None = None,
        accelerator: CudaAccelerator | None = None,
    ) -> None:
        self._device = device or torch.device("cpu")
        if accelerator is None and self._device.type == "cuda":
            accelerator = CudaAccelerator(self._device)
        self._autocast = precision == "bfloat16"
        self._pad_to = tuple(pad_to)
        self._num_threads = num_threads
        example = map_tensors(lambda tensor: _as_served(tensor, model), example)
        self._form = InputForm(example)
        self._is_narrow = _precision_of(model) == torch.bfloat16
        specs = input_specs(example, padding)
        self._transfer = HostTransfer(specs) if accelerator is None else StreamedTransfer(specs, accelerator)
        self.num_in_flight = self._transfer.num_in_flight
        self._takes_gradients = False
        self._name = name
        self._texts: set[str] | None = None
        """Outputs with a text for each sample; None: not known yet."""
        model = model.to(self._device).eval()
        self.module = model
        """Network itself, uncompiled, on its device and in evaluation mode."""
        called: Any = _compiled(model, compile, len(self._pad_to)) if compile else model
        self._answer: Callable[[Any], Any] = partial(call, called)
        self._compiled_by = "inductor" if compile is True else compile
        self._graphs: Recorded | None = None
        if graphs and accelerator is not None:
            record = accelerator.record_graph
            self._graphs = Recorded(
                self._answer, self._pad_to, lambda model, inputs: record(lambda given: _tensors(model(given)), inputs)
            )
            self._answer = self._graphs
        self.pin_threads()
        tensors = zip(specs, self._form.tensors(example), strict=True)
        sample = {spec.name: tensor.numpy() for spec, tensor in tensors}
        try:
            answered = self._forward([sample])
        except RuntimeError as error:
            if not wants_gradients(error):
                raise
            self._takes_gradients = True
            answered = self._forward([sample])
        outputs = tuple(TensorSpec(name, str(array.dtype), array.shape) for name, array in answered[0].items())
        self._run = self._forward
        if padding is not None:
            any_length = AnyLength(self._forward, padding, name, in_buckets=bool(self._pad_to))
            outputs, self._run = any_length.outputs(sample, outputs), any_length.run
        self.signature = Signature(name, version, specs, outputs, example_values(example), padding=padding)

    def pin_threads(self) -> None:
        """Set torch's number of threads in the calling thread to this model's: more would compete for the cores."""
        if self._device.type == "cpu":
            torch.set_num_threads(self._num_threads)

    def warm_up(self, max_batch_size: int) -> None:
        """Run batches of the sizes that will come, so that no request pays for one-time work."""
        sample = self.signature.parse(self.signature.example)
        sizes = {*self._pad_to, 1, max_batch_size} if self._pad_to else {1, 2, max_batch_size}
        for size in sorted(sizes, reverse=True):  # graphs share memory: the largest first, and the others fit into it
            self._forward([sample] * min(size, max_batch_size))
        self.signature = replace(self.signature, computing=self._computing())
        if max_batch_size > 1 and self._mixes(sample):
            _log.warning(
                "%s answers a sample otherwise beside other samples. Layers without batch_first=True do so, and batch "
                "normalisation without running statistics. With batching.max_batch_size=1 each is answered alone",
                self._name,
            )

    def _mixes(self, sample: Sample) -> bool:
        """Return True if an answer depends on the other samples of its batch."""
        other = {name: 2 * each + 1 if each.dtype.kind == "f" else np.flip(each) for name, each in sample.items()}
        try:
            alike = self._forward([sample, sample])
            if _agree(alike, [self._forward([sample, other])[0], self._forward([other, sample])[1]]):
                return False
            return _agree(alike, self._forward([sample, sample]))  # else its answers are drawn at random
        except Exception:  # noqa: BLE001 - a model may refuse values that its data never had
            return False

    def _computing(self) -> dict[str, Any]:
        """Return how batches are computed, as JSON values."""
        about: dict[str, Any] = {"device": str(self._device)}
        if self._pad_to:
            about["padded_to"] = list(self._pad_to)
        if self._compiled_by:
            about["compiled_by"] = self._compiled_by
        if self._graphs is not None:
            about["cuda_graphs"] = self._graphs.recorded
            about["without_cuda_graph"] = {str(size): reason for size, reason in self._graphs.refused.items()}
        return about

    def run(self, samples: Sequence[Sample]) -> Answers:
        """Return an answer for each sample, by one forward pass.

        If that fails, the batch is halved until the samples that fail are alone; the others are answered.

        Args:
            samples: results of `signature.parse`.
        """
        return run_isolated(self._name, self._run, samples)

    def _forward(self, samples: Sequence[Sample]) -> list[Output]:
        size = padded_size(len(samples), self._pad_to)
        arrays, texts = self._transfer.run(samples, size, self._answers)
        return [
            {name: array[row] for name, array in arrays.items()}
            | {name: boxed(column[row]) for name, column in texts.items()}
            for row in range(len(samples))
        ]

    def _answers(self, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Sequence[str]]]:
        """Return the model's tensors and texts for a batch by name, [size, ...] each."""
        size = len(next(iter(inputs.values())))
        with torch.enable_grad() if self._takes_gradients else torch.inference_mode(), self._precision():
            answered = self._answer(self._form.filled([self._as_weights(each) for each in inputs.values()]))
            outputs, rest = by_name(answered)
        if self._texts is None:
            self._texts = self._texts_of(rest, size)
        texts = {name: each for name, each in rest.items() if name in self._texts}
        if wrong := [name for name, column in texts.items() if len(column) != size]:
            raise ModelError(f"the model answers {size} samples with {len(texts[wrong[0]])} texts, {wrong[0]}")
        for name, tensor in outputs.items():
            if tensor.dim() == 0 or len(tensor) != size:
                raise ModelError(
                    f"the model answers {size} samples with {name} of shape {list(tensor.shape)}: "
                    "the first dimension must count the samples"
                )
            if tensor.is_complex():
                raise ModelError(f"the model answers with complex numbers, {name}: return torch.view_as_real of it")
        return outputs, texts

    def _as_weights(self, tensor: Tensor) -> Tensor:
        return tensor.bfloat16() if self._is_narrow and tensor.is_floating_point() else tensor

    def _texts_of(self, rest: Mapping[str, Any], size: int) -> set[str]:
        """Return the names of the lists that have a text for each sample, and warn of values that are not answered."""
        texts = {name for name, each in rest.items() if isinstance(each, list | tuple) and len(each) == size}
        others = {name: each for name, each in rest.items() if name not in texts and each is not None}
        if clauses := [f"{name} (a {type(each).__name__})" for name, each in others.items()]:
            some = ", ".join(clauses[:_MOST_NAMED]) + (", ..." if len(clauses) > _MOST_NAMED else "")
            _log.warning("%s returns %s: no tensors or texts of samples, which are not answered", self._name, some)
        return texts

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast:
            # A graph would read cast weights from a cache that is emptied when the batch that it was recorded of ends.
            cached = self._graphs is None
            return torch.autocast(self._device.type, dtype=torch.bfloat16, cache_enabled=cached)
        return contextlib.nullcontext()


def _agree(answers: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(
        each.dtype == object or np.allclose(each, other[name], _RELATIVE, _ABSOLUTE, equal_nan=True)
        for answer, other in zip(answers, others, strict=True)
        for name, each in answer.items()
    )


def _as_served(example: Tensor, model: nn.Module) -> Tensor:
    """Return the example in the model's own precision: a model trained in float64 takes float64.

    In bfloat16, which numpy lacks, it takes float32, and its inputs are cast.
    """
    example = example.detach().cpu()
    if not example.is_floating_point():
        return example
    dtype = _precision_of(model) or example.dtype
    return example.to(torch.float32 if dtype == torch.bfloat16 else dtype)


def _precision_of(model: nn.Module) -> torch.dtype | None:
    return next((each.dtype for each in model.parameters() if each.is_floating_point()), None)


def _compiled(model: nn.Module, backend: bool | str, num_sizes: int) -> Any:
    """Compile a model with a graph for each batch size, however many.

    By default torch stops compiling after eight graphs of a function, counted over all models.
    """
    chosen = backend if isinstance(backend, str) else "inductor"
    most = max(num_sizes, torch._dynamo.config.recompile_limit)
    compiler: Any = torch.compile  # torch's stubs lack the last two so far
    return compiler(model, backend=chosen, dynamic=False, recompile_limit=most, isolate_recompiles=True)


def input_specs(example: Any, padding: Padding | None = None) -> tuple[TensorSpec, ...]:
    """Return the inputs of a model, by one sample of them, and by which of them have any length.

    Raises:
        CheckpointError: the padding names others.
    """
    named = dict(zip(InputForm(example).names, InputForm(example).tensors(example), strict=True))
    variable = {} if padding is None else padding.values
    for name in (*variable, *([] if padding is None or padding.mask is None else [padding.mask])):
        if name not in named or not named[name].dim() or name not in variable:
            inputs = ", ".join(named)
            raise CheckpointError(
                f"its task's padding must map names of inputs with a dimension ({inputs}), the mask among them, to "
                f"numbers; it does not do so for {name}"
            )
    return tuple(
        TensorSpec(
            name,
            str(tensor.dtype).removeprefix("torch."),
            (None, *tensor.shape[1:]) if name in variable else tuple(tensor.shape),
        )
        for name, tensor in named.items()
    )


def example_values(example: Any) -> Any:
    """Return one sample as JSON values, as `Signature.parse` takes it."""
    named = zip(InputForm(example).names, InputForm(example).tensors(example), strict=True)
    values = {name: tensor.tolist() for name, tensor in named}
    return values if len(values) > 1 else next(iter(values.values()))


def by_name(outputs: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a model's tensors, in mappings and sequences of any depth, by name: `outputs`, `outputs_0`, `a.b`.

    Returns:
        the tensors, and whatever else is there, in which lists and tuples are of texts.

    Raises:
        ModelError: there are none, or two have one name, such as those of `{"a.b": ..., "a": {"b": ...}}`.
    """
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    for name, value in _leaves(outputs, ""):
        if name in tensors and isinstance(value, Tensor):
            raise ModelError(f"the model answers with two outputs named {name}: rename one, or it would be lost")
        (tensors if isinstance(value, Tensor) else rest)[name] = value
    if not tensors and not any(isinstance(each, list | tuple) for each in rest.values()):
        raise ModelError(f"the model answers with a {type(outputs).__name__}: wanted a tensor, or several")
    return tensors, rest


def _tensors(outputs: Any) -> dict[str, Tensor]:
    """Return a model's tensors as `by_name` does.

    Raises:
        ModelError: it answers with texts, too, which are the CPU's work and would be the same at each replay.
    """
    tensors, rest = by_name(outputs)
    if texts := [name for name, each in rest.items() if isinstance(each, list | tuple)]:
        raise ModelError(f"it answers with texts ({', '.join(texts)}), which a graph does not compute")
    return tensors


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(part, f"{name}.{key}" if name else str(key))
    elif hasattr(value, "_asdict"):  # a named tuple
        yield from _leaves(value._asdict(), name)
    elif is_dataclass(value):
        yield from _leaves(vars(value), name)
    elif isinstance(value, tuple | list) and not (value and all(isinstance(part, str) for part in value)):
        for index, part in enumerate(value):
            yield from _leaves(part, f"{name or 'outputs'}_{index}")
    else:
        yield name or "outputs", value
