"""The device of a model, and what a GPU offers to those that feed it: streams, events, pinned memory. Imports torch."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from orchestray.platform.actors.gpus import own_gpu
from orchestray.platform.data.nested import map_tensors, tensors_in
from orchestray.platform.errors import ConfigError
from orchestray.platform.process.gpu import gpus_touched

_NUM_WARM_UPS = 3
"""Number of calls before one is recorded: they compile, choose algorithms and allocate, which a recording must not."""

Call: TypeAlias = Callable[[Any], dict[str, Tensor]]
"""A function of inputs, tensors or nested containers of them, [samples, ...] each, to outputs by name."""


def chosen_device(num_gpus: float) -> torch.device:
    """Return the GPU of this process, with its index, if one is asked for, else the CPU.

    Ray shows a process the GPUs that it set aside for it. A fraction is a share of one.

    Raises:
        ConfigError: more GPUs are asked for than exist.
    """
    if not num_gpus:
        return torch.device("cpu")
    found = torch.cuda.device_count()
    if num_gpus > found:
        raise ConfigError(
            f"resources.gpus_per_worker: asks for {num_gpus:g} GPU, and torch finds {found or 'none'} here; "
            f"set it to {found} at most"
        )
    return own_gpu()


def limit_memory(num_gpus: float) -> None:
    """Hold torch in this process to its share of a GPU's memory, so that it cannot take that of those beside it.

    Args:
        num_gpus: fraction of a GPU; from 1 on, and for 0, there is no limit.
    """
    if 0 < num_gpus < 1:
        torch.cuda.set_per_process_memory_fraction(num_gpus, chosen_device(num_gpus))


def release_memory() -> None:
    """Give the memory of models that are garbage back to their GPU, for other models or processes to take."""
    gc.collect()
    if gpus_touched():
        torch.cuda.empty_cache()


class CudaAccelerator:
    """A GPU, which computes while the CPU goes on.

    All graphs that it records share one pool of memory, so that the largest one's suffices for all.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None

    def stream(self, name: str) -> torch.cuda.Stream:
        """Return a new stream; its name is for those who read a trace."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """Return a context whose work is that of a stream."""
        return torch.cuda.stream(stream)

    def pinned(self, num_bytes: int) -> Tensor:
        """Return memory of the CPU that the device copies from and to by itself, uint8 [num_bytes]."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Have the current stream copy a tensor, without waiting for it."""
        into.copy_(source, non_blocking=True)

    def record_graph(self, model: Call, inputs: Any) -> Call:
        """Record a graph of the model for inputs of one shape, on the current stream.

        Returns:
            a function whose answers last until the next call of any graph of this device.

        Raises:
            RuntimeError: the model does something that a graph cannot hold, such as a branch on a result.
        """
        taken = map_tensors(torch.clone, inputs)
        places = tensors_in(taken)
        for _ in range(_NUM_WARM_UPS):
            model(taken)
        stream = torch.cuda.current_stream(self.device)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # Other threads may use the GPU meanwhile: for another model, or for batches of the previous version.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            outputs = model(taken)

        def replay(inputs: Any) -> dict[str, Tensor]:
            with torch.no_grad():  # a model that takes gradients has made its inputs need them
                for place, tensor in zip(places, tensors_in(inputs), strict=True):
                    place.copy_(tensor)
            graph.replay()
            return outputs

        return replay
