"""CUDA graphs: the kernels of a batch are launched together, not one by one. Imports torch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from orchestray.platform.data.nested import tensors_in
from orchestray.serving.models.device import Call
from orchestray.trainers.core.own_gradients import wants_gradients

_log = logging.getLogger("orchestray.serving")

_MOST_GRAPHS = 64
"""Most shapes that are recorded: samples of any length would bring new ones for ever, each with memory of its own."""
_Shapes: TypeAlias = tuple[tuple[int, ...], ...]


class Recorded:
    """A model that is called through CUDA graphs, one per shape of a batch, recorded when a shape first comes.

    A graph always reads and writes the same memory. Inputs are copied there, and answers from there, in stream order,
    so that any thread may call this. Batches that cannot be recorded are run without a graph.

    Args:
        model: function of inputs, whose outputs are answered as they are where there is no graph.
        sizes: batch sizes that are recorded; others are run without a graph.
        record: makes a graph of the model for inputs of one shape, whose answers last until its next call.
    """

    def __init__(
        self, model: Callable[[Any], Any], sizes: Sequence[int], record: Callable[[Callable[[Any], Any], Any], Call]
    ) -> None:
        self._model = model
        self._sizes = frozenset(sizes)
        self._record = record
        self._graphs: dict[_Shapes, Call | None] = {}
        """Maps shapes of batches to their graphs; None: no graph can hold one."""
        self._lock = threading.Lock()
        self._refused: dict[int, str] = {}

    @property
    def recorded(self) -> list[int]:
        """Sizes of batches that are run as graphs, ascending."""
        with self._lock:
            return sorted({shapes[0][0] for shapes, graph in self._graphs.items() if graph})

    @property
    def refused(self) -> dict[int, str]:
        """Sizes of batches that no graph can hold, each with the reason."""
        with self._lock:
            return dict(sorted(self._refused.items()))

    def __call__(self, inputs: Any) -> Any:
        shapes = tuple(tuple(tensor.shape) for tensor in tensors_in(inputs))
        if shapes[0][0] not in self._sizes:
            return self._model(inputs)
        with self._lock:  # nothing in here waits for the GPU, once the shape is recorded
            if shapes not in self._graphs:
                self._graphs[shapes] = self._recorded(shapes, inputs)
            if (graph := self._graphs[shapes]) is not None:
                return {name: tensor.clone() for name, tensor in graph(inputs).items()}
        return self._model(inputs)

    def _recorded(self, shapes: _Shapes, inputs: Any) -> Call | None:
        size = shapes[0][0]
        try:
            if len(self._graphs) >= _MOST_GRAPHS:
                raise RuntimeError(f"there are {_MOST_GRAPHS} graphs already, of other shapes")  # noqa: TRY301 - one way
            return self._record(self._model, inputs)
        except Exception as error:  # models fail with all kinds of errors on what a graph cannot hold
            if isinstance(error, RuntimeError) and wants_gradients(error):
                raise  # the caller tries again with gradients, and then a graph may hold it
            reason = str(error).partition("\n")[0]
            if self._refused.get(size) != reason:
                _log.warning("no CUDA graph could be made for batches of %s, which are run without: %s", size, reason)
            self._refused[size] = reason
            return None
