"""The cost of a network: its parameters, the operations per sample, and its latency on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from orchestray.platform.data.nested import map_tensors
from orchestray.platform.process import torch_threads
from orchestray.trainers.analysis.flops import Flops, flops
from orchestray.trainers.core.inputs import arguments
from orchestray.trainers.core.modes import evaluating

_WARM_UP = 3


@dataclass(frozen=True)
class Measures:
    """The measured costs of one network."""

    parameters: int
    """Number of trainable parameters."""
    flops: Flops
    """Operations of one sample's forward pass."""
    latency_ms: float
    """Median latency of warm forward passes of one sample, with one thread."""


def measure(network: nn.Module, inputs: Any, *, passes: int = 15) -> Measures:
    """Measure a network in evaluation mode; its own mode is restored afterwards.

    Args:
        network: any module.
        inputs: its inputs for one sample, as a task makes them: a tensor, or several in a tuple or a mapping.
        passes: number of timed forward passes, after warm-up.
    """
    tensors = [*network.parameters(), *network.buffers()]
    device = tensors[0].device if tensors else torch.device("cpu")
    dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
    args, kwargs = map_tensors(
        lambda one: one.to(device, dtype if one.is_floating_point() else None), arguments(inputs)
    )
    with evaluating(network), torch_threads.using(1), torch.no_grad():
        return Measures(
            parameters=num_parameters(network),
            flops=flops(network, *args, **kwargs),
            latency_ms=_latency_ms(network, args, kwargs, passes),
        )


def num_parameters(network: nn.Module) -> int:
    """Return the number of trainable parameters; a tensor shared under two names counts once."""
    return sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)


def _latency_ms(network: nn.Module, args: Any, kwargs: Any, passes: int) -> float:
    gpus = {parameter.device for parameter in network.parameters() if parameter.is_cuda}
    taken_ms = []
    for number in range(_WARM_UP + passes):
        begin = perf_counter()
        network(*args, **kwargs)
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        if number >= _WARM_UP:
            taken_ms.append((perf_counter() - begin) * 1e3)
    return median(taken_ms)
