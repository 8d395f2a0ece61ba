"""CUDA graphs: the kernels of a batch are launched together, not one by one. Imports torch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from orchestray.platform.data.nested import map_tensors, tensors_in

_log = logging.getLogger("orchestray.serving")

_NUM_WARM_UPS = 3
"""Number of calls before one is recorded: they compile, choose algorithms and allocate, which a recording must not."""

Call: TypeAlias = Callable[[Any], dict[str, Tensor]]
"""A function of inputs, tensors or nested containers of them, [samples, ...] each, to outputs by name."""


class Recorded:
    """A model that is called through CUDA graphs, one per batch size, recorded when a size first comes.

    A graph always reads and writes the same memory. Inputs are copied there, and answers from there, in stream order,
    so that any thread may call this. Batches that cannot be recorded are run without a graph.

    Args:
        model: function from inputs to outputs by name.
        sizes: batch sizes that are recorded; others are run without a graph.
        record: makes a graph of the model for inputs of one shape, whose answers last until its next call.
    """

    def __init__(self, model: Call, sizes: Sequence[int], record: Callable[[Call, Any], Call] | None = None) -> None:
        self._model = model
        self._sizes = frozenset(sizes)
        self._record = record or record_graph
        self._graphs: dict[int, Call] = {}
        self._lock = threading.Lock()

    def __call__(self, inputs: Any) -> dict[str, Tensor]:
        size = _size(inputs)
        if size not in self._sizes:
            return self._model(inputs)
        with self._lock:  # nothing in here waits for the GPU, once the size is recorded
            graph = self._graphs.get(size)
            if graph is None:
                graph = self._graphs[size] = self._recorded(inputs)
            if graph is not self._model:
                return {name: tensor.clone() for name, tensor in graph(inputs).items()}
        return self._model(inputs)

    def _recorded(self, inputs: Any) -> Call:
        try:
            return self._record(self._model, inputs)
        except Exception as error:  # noqa: BLE001 - models fail with all kinds of errors on what a graph cannot hold
            _log.warning(
                "no CUDA graph could be made for batches of %s, which are run without: %s", _size(inputs), error
            )
            return self._model


def _size(inputs: Any) -> int:
    return len(tensors_in(inputs)[0])


def record_graph(model: Call, inputs: Any) -> Call:
    """Record a graph of the model for inputs of this shape, on the current stream, which must not be the default one.

    Raises:
        RuntimeError: the model does something that a graph cannot hold, such as a branch on a result.
    """
    taken = map_tensors(torch.clone, inputs)
    places = tensors_in(taken)
    for _ in range(_NUM_WARM_UPS):
        model(taken)
    stream = torch.cuda.current_stream(places[0].device)
    graph = torch.cuda.CUDAGraph()
    # Other threads may use the GPU meanwhile: for another model, or for batches of the previous version.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        outputs = model(taken)

    def replay(inputs: Any) -> dict[str, Tensor]:
        for place, tensor in zip(places, tensors_in(inputs), strict=True):
            place.copy_(tensor)
        graph.replay()
        return outputs

    return replay
