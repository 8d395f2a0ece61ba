"""Steps that are run for real, to hold a model's prediction against."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from orchestray.platform.data.nested import map_tensors

_SCALE = 0.02


def materialised(model: nn.Module, inputs: Any, seed: int = 0) -> tuple[nn.Module, Any]:
    """Return a model and inputs of `meta` on the CPU, with random values: their times hardly depend on values.

    Args:
        model: model on `meta`; it is changed in place.
        inputs: inputs on `meta`; whole numbers become 0, which every vocabulary has.
        seed: seed of the values.
    """
    generator = torch.Generator().manual_seed(seed)
    real = model.to_empty(device="cpu")
    with torch.no_grad():
        for each in (*real.parameters(), *real.buffers()):
            _fill(each, generator)
    return real, map_tensors(lambda each: _fill(torch.empty(each.shape, dtype=each.dtype), generator), inputs)


def _fill(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.zero_()
    return tensor.uniform_(_SCALE / 2, _SCALE, generator=generator)  # above 0: a variance is among the buffers


def steps_s(forward: Callable[[], Tensor], parameters: Callable[[], Any], num_steps: int) -> list[float]:
    """Return the seconds of each of some forward and backward passes.

    Args:
        forward: returns the loss.
        parameters: returns the parameters, whose gradients are dropped before each step.
        num_steps: number of steps.
    """
    times_s = []
    for _ in range(num_steps):
        for each in parameters():
            each.grad = None
        began_s = perf_counter()
        forward().backward()  # type: ignore[no-untyped-call]
        times_s.append(perf_counter() - began_s)
    return times_s
