"""The cost of a network: its parameters, the operations per sample, and its latency on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from orchestray.platform.process import torch_threads
from orchestray.trainers.core.modes import evaluating

_WARM_UP = 3


@dataclass(frozen=True)
class Measures:
    """The measured costs of one network."""

    parameters: int
    """Number of trainable parameters."""
    flops: int
    """Number of floating point operations of one sample's forward pass, as counted by `torch.utils.flop_counter`:
    convolutions and matrix products; a multiplication and an addition count as two.
    """
    latency_ms: float
    """Median latency of warm forward passes of one sample, with one thread."""
    batch_latency_ms: float
    """Median latency of warm forward passes of `batch_size` samples."""
    batch_size: int

    def to_json(self) -> dict[str, float]:
        """Return the measures by name."""
        return asdict(self)


def measure(network: nn.Module, input_shape: Sequence[int], *, batch_size: int = 32, passes: int = 15) -> Measures:
    """Measure a network in evaluation mode; its own mode is restored afterwards.

    Args:
        network: module for inputs [batch, *input_shape].
        input_shape: shape of one sample.
        batch_size: batch size of the second latency.
        passes: number of timed forward passes per batch size, after warm-up.
    """
    example = torch.zeros(1, *input_shape, dtype=_dtype_of(network))
    many = example.expand(batch_size, *input_shape).contiguous()
    with evaluating(network), torch_threads.using(1), torch.no_grad():
        return Measures(
            parameters=num_parameters(network),
            flops=flops(network, example),
            latency_ms=_latency_ms(network, example, passes),
            batch_latency_ms=_latency_ms(network, many, passes),
            batch_size=batch_size,
        )


def num_parameters(network: nn.Module) -> int:
    """Return the number of trainable parameters; a tensor shared under two names counts once."""
    return sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)


def flops(network: nn.Module, inputs: Tensor) -> int:
    """Return the number of floating point operations of a forward pass."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(inputs)
    return int(counter.get_total_flops())


def _latency_ms(network: nn.Module, inputs: Tensor, passes: int) -> float:
    for _ in range(_WARM_UP):
        network(inputs)
    taken_ms = []
    for _ in range(passes):
        begin = perf_counter()
        network(inputs)
        taken_ms.append((perf_counter() - begin) * 1e3)
    return median(taken_ms)


def _dtype_of(network: nn.Module) -> torch.dtype:
    return next((tensor.dtype for tensor in network.parameters() if tensor.is_floating_point()), torch.float32)
