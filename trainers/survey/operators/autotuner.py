"""The choice of a convolution's algorithm by running each on the shapes at hand, as cuDNN and oneDNN can do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from orchestray.trainers.analysis.memory import peak_bytes
from orchestray.trainers.survey.operators import convolutions, fbfft, fourier, winograd

Algorithm: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Function of inputs, with their padding, and weights."""
ALGORITHMS: Mapping[str, Algorithm] = {
    "torch": functional.conv2d,
    "im2col": convolutions.im2col,
    "kn2row": convolutions.kn2row,
    "implicit GEMM": convolutions.implicit_gemm,
    "Winograd F(2)": winograd.winograd,
    "Winograd F(4)": lambda x, weight: winograd.winograd(x, weight, 4),
    "CHWN": convolutions.through_chwn,
    "FFT": fourier.fourier,
    "FFT, tiled": fourier.fourier_tiled,
    "FFT, unordered": fbfft.fourier_small,
}
_TIMES, _ENOUGH_S = 5, 1.0
"""Runs of an algorithm that are timed; fewer if they take longer than that in all."""


class Autotuner:
    """A convolution that remembers for each shape the fastest algorithm that keeps to a memory limit.

    Args:
        limit_bytes: bytes that an algorithm may need beside inputs, weights and outputs; None: any number.
        file: file in which the choices are kept; None: they are not.
        algorithms: algorithms to choose from, by name.
    """

    def __init__(
        self,
        *,
        limit_bytes: int | None = None,
        file: Path | None = None,
        algorithms: Mapping[str, Algorithm] = ALGORITHMS,
    ) -> None:
        self._limit_bytes, self._file, self._algorithms = limit_bytes, file, algorithms
        self._chosen: dict[str, str] = {}
        if file is not None and file.exists():
            self._chosen = json.loads(file.read_text(encoding="utf-8"))

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the convolution by the algorithm chosen for its shape."""
        return self._algorithms[self.choice(x, weight)](x, weight)

    def choice(self, x: Tensor, weight: Tensor) -> str:
        """Return the name of the algorithm for these inputs and weights; the first time, all are run.

        Raises:
            ValueError: none keeps to the limit.
        """
        key = f"{list(x.shape)} {list(weight.shape)} {x.dtype} {torch.get_num_threads()} {self._limit_bytes}"
        if self._chosen.get(key) not in self._algorithms:
            found = {name: one for name, one in self._algorithms.items() if self._keeps_to_limit(one, x, weight)}
            if not found:
                raise ValueError(f"no algorithm keeps to {self._limit_bytes} bytes for {key}")
            times_s = {name: time_s(algorithm, x, weight) for name, algorithm in found.items()}
            self._chosen[key] = min(times_s, key=times_s.__getitem__)
            if self._file is not None:
                self._file.write_text(json.dumps(self._chosen, indent=1), encoding="utf-8")
        return self._chosen[key]

    def _keeps_to_limit(self, algorithm: Algorithm, x: Tensor, weight: Tensor) -> bool:
        try:
            return self._limit_bytes is None or extra_bytes(algorithm, x, weight) <= self._limit_bytes
        except RuntimeError:  # it does not take the shape, as Winograd's with kernels that are not square
            return False


def time_s(algorithm: Algorithm, x: Tensor, weight: Tensor) -> float:
    """Return the least seconds of some convolutions, after a first one; infinite if the shape does not fit."""
    taken_s = []
    try:
        algorithm(x, weight)
    except RuntimeError:
        return float("inf")
    for _ in range(_TIMES):
        began_s = perf_counter()
        algorithm(x, weight)
        taken_s.append(perf_counter() - began_s)
        if sum(taken_s) > _ENOUGH_S:
            break
    return min(taken_s)


def extra_bytes(algorithm: Algorithm, x: Tensor, weight: Tensor) -> int:
    """Return the most bytes of tensors that live at a time in an algorithm, without its inputs and its outputs.

    Nothing is computed: tensors have shapes alone.
    """
    x, weight = x.to("meta"), weight.to("meta")
    outputs = algorithm(x, weight)
    return peak_bytes(lambda: algorithm(x, weight)) - outputs.numel() * outputs.element_size()
