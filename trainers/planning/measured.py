"""The times of a model's layers on this machine, and the roofline's limits (Williams et al. 2009)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.platform.errors import TaskError
from orchestray.trainers.planning.analyse import Analysis, PassCost, analyse
from orchestray.trainers.planning.layer_times import LayerTimes
from orchestray.trainers.planning.subject import Subject
from orchestray.trainers.survey.operators.autotuner import KeptTimes, tried_s

_TIMES = 5
_CEILING_S = 0.7
LIMIT_BYTES = 10**9
"""Bytes that an algorithm may need beside inputs and outputs to be tried, if nothing else is said."""
_SIDE, _COPIED = 1024, (2**15, 2**24)
"""Sides of matrices, and sizes of copies: the smaller one stays in a cache, as the tensors of small layers do."""


@dataclass(frozen=True)
class Ceilings:
    """The fastest that this machine computes and moves."""

    operations_per_s: float
    """Operations of a product of large matrices, a multiplication and an addition as two."""
    bytes_per_s: float
    """Bytes read and written by a copy."""

    def limit_s(self, cost: PassCost) -> float:
        """Return the seconds below which no machine with these ceilings is."""
        return max(cost.work / self.operations_per_s, cost.num_bytes / self.bytes_per_s)

    def reached(self, cost: PassCost, seconds: float) -> float:
        """Return the part of the ceilings that a pass reaches which takes so long."""
        return self.limit_s(cost) / seconds


def measure_ceilings() -> Ceilings:
    """Measure the ceilings with torch's threads, in about two seconds."""
    a, b = torch.rand(_SIDE, _SIDE), torch.rand(_SIDE, _SIDE)
    copies = [(torch.zeros(size), torch.empty(size)) for size in _COPIED]
    rates = [2 * source.nbytes / _fastest_s(partial(target.copy_, source)) for source, target in copies]
    return Ceilings(2 * _SIDE**3 / _fastest_s(partial(torch.matmul, a, b)), max(rates))


def _fastest_s(call: Any) -> float:
    call()
    taken_s, until_s = [], perf_counter() + _CEILING_S
    while perf_counter() < until_s:
        began_s = perf_counter()
        call()
        taken_s.append(perf_counter() - began_s)
    return min(taken_s)


@dataclass(frozen=True)
class Measured:
    """The times of a step of a model."""

    ceilings: Ceilings
    step_s: float
    """Median seconds of a forward and a backward pass."""
    forward_s: Mapping[str, float]
    """Median seconds of the forward pass of each layer that has none with operations within it."""
    backward_s: Mapping[str, float]
    """Those of the backward pass, where it can be seen; see `LayerTimes`."""
    limits_s: Mapping[str, tuple[float, float]]
    """Seconds of the forward and of the backward pass of each layer by the ceilings."""
    convolutions: Mapping[str, Mapping[str, float]]
    """Seconds of each algorithm for the layers that are convolutions with stride 1; infinite where it does not take the
    shape, or needs more memory than it may.
    """

    def to_json(self) -> dict[str, Any]:
        times = {
            layer: {name: None if seconds == float("inf") else seconds for name, seconds in found.items()}
            for layer, found in self.convolutions.items()
        }
        return {
            "ceilings": asdict(self.ceilings),
            "step_s": self.step_s,
            "forward_s": dict(self.forward_s),
            "backward_s": dict(self.backward_s),
            "limits_s": {
                layer: {"forward": forward_s, "backward": backward_s}
                for layer, (forward_s, backward_s) in self.limits_s.items()
            },
            "convolutions": times,
        }


def analysed_on(subject: Callable[[str], Subject]) -> Analysis:
    """Analyse a model on `meta`, or if it looks at values, as it runs on the CPU; the notes say so.

    Args:
        subject: returns the model on a device.

    Raises:
        TaskError: it runs on neither.
    """
    try:
        return analyse(subject("meta"))
    except TaskError as error:
        note = (
            f"counted as it ran, with the values at hand: it {str(error).partition(' ')[2].partition('. If it is')[0]}"
        )
        return analyse(replace(found := subject("cpu"), notes=(*found.notes, note)))


def measure(
    subject: Subject, analysis: Analysis, *, limit_bytes: int = LIMIT_BYTES, kept: KeptTimes | None = None
) -> Measured:
    """Measure a model: run some steps, and each algorithm for each convolution.

    Args:
        subject: the model with values, on the CPU.
        analysis: its analysis.
        limit_bytes: bytes that an algorithm may need beside inputs and outputs to be tried.
        kept: times of algorithms that were tried before; None: each is tried.
    """
    layers = {layer.name for layer in analysis.layers if layer.name}
    times = LayerTimes({name: module for name, module in subject.model.named_modules() if name in layers})
    steps_s = []
    with times.watched():
        for number in range(_TIMES + 1):
            with times.step(counts=number > 0):
                began_s = perf_counter()
                loss = subject.forward()
                if loss.requires_grad:
                    loss.backward()  # type: ignore[no-untyped-call]
                steps_s.append(perf_counter() - began_s)
            subject.model.zero_grad()
    found = {name: _times_of(module, times.inputs[name], limit_bytes, kept) for name, module in times.convolutions()}
    ceilings = measure_ceilings()
    limits_s = {
        each.name: (ceilings.limit_s(each.forward), ceilings.limit_s(each.backward)) for each in analysis.layers
    }
    return Measured(ceilings, median(steps_s[1:]), times.forward_s, times.backward_s, limits_s, found)


def _times_of(module: nn.Conv2d, x: Tensor, limit_bytes: int, kept: KeptTimes | None) -> dict[str, float]:
    rows, columns = (int(size) for size in module.padding)
    x = functional.pad(x, (columns, columns, rows, rows))
    with torch.no_grad():
        return tried_s(x, module.weight.detach(), limit_bytes=limit_bytes, kept=kept)
