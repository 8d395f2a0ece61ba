"""What a network costs: its parameters, the arithmetic of one sample, and how long an answer takes on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from orchestray.platform import torch_threads

_WARM_UP = 3


@dataclass(frozen=True)
class Measures:
    """Of one network."""

    parameters: int
    """Numbers that are trained."""
    flops: int
    """Floating point operations of one sample's forward pass, as torch counts them (`torch.utils.flop_counter`):
    convolutions and matrix products, a multiplication and an addition being two."""
    latency_ms: float
    """Median of warm forward passes of one sample, by one thread."""
    batch_latency_ms: float
    """Of `batch_size` samples at once."""
    batch_size: int

    def to_json(self) -> dict[str, float]:
        """By name."""
        return asdict(self)


def measure(network: nn.Module, input_shape: Sequence[int], *, batch_size: int = 32, passes: int = 15) -> Measures:
    """Measure a network as it is used after training; it is left in the mode it was in.

    Args:
        network: from [batch, *input_shape].
        input_shape: of one sample.
        batch_size: of the second latency.
        passes: forward passes of each size that are timed, after some that are not.
    """
    example = torch.zeros(1, *input_shape, dtype=_dtype_of(network))
    many = example.expand(batch_size, *input_shape).contiguous()
    with _evaluating(network), torch.no_grad():
        return Measures(
            parameters=num_parameters(network),
            flops=flops(network, example),
            latency_ms=_latency_ms(network, example, passes),
            batch_latency_ms=_latency_ms(network, many, passes),
            batch_size=batch_size,
        )


def num_parameters(network: nn.Module) -> int:
    """Numbers that are trained; a tensor with two names counts once."""
    return sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)


def flops(network: nn.Module, inputs: Tensor) -> int:
    """Floating point operations of a forward pass."""
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


@contextmanager
def _evaluating(network: nn.Module) -> Iterator[None]:
    """In evaluation mode and by one thread."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        with torch_threads.using(1):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _dtype_of(network: nn.Module) -> torch.dtype:
    return next((tensor.dtype for tensor in network.parameters() if tensor.is_floating_point()), torch.float32)
