"""The choice of a convolution's algorithm by running each on the shapes at hand, as cuDNN and oneDNN can do."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from orchestray.platform.errors import StorageError
from orchestray.platform.run.files import write_atomic
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


@dataclass(frozen=True)
class KeptTimes:
    """The times of algorithms on disk, a file for each shape.

    Args:
        directory: directory of the files.
        versions: what times depend on beside shape, type and threads: the version of torch, the processor.
    """

    directory: Path
    versions: Mapping[str, str]

    def read(self, x: Tensor, weight: Tensor) -> dict[str, float]:
        """Return the seconds of the algorithms that were run on this shape, by name."""
        with contextlib.suppress(
            OSError, ValueError, TypeError, AttributeError
        ):  # none, or not a file of times: they run again
            known = json.loads(self._file(x, weight).read_text(encoding="utf-8"))
            return {name: math.inf if seconds is None else float(seconds) for name, seconds in known.items()}
        return {}

    def write(self, x: Tensor, weight: Tensor, times_s: Mapping[str, float]) -> None:
        """Keep the seconds of the algorithms that were run on this shape."""
        known = {name: None if math.isinf(seconds) else seconds for name, seconds in times_s.items()}
        with contextlib.suppress(OSError, StorageError):  # a full disk: they run again
            self.directory.mkdir(parents=True, exist_ok=True)
            write_atomic(self._file(x, weight), json.dumps(known).encode())

    def _file(self, x: Tensor, weight: Tensor) -> Path:
        setting = [str(x.dtype), torch.get_num_threads(), torch.backends.mkldnn.enabled]
        known = json.dumps([list(x.shape), list(weight.shape), *setting, dict(self.versions)], sort_keys=True)
        return self.directory / f"{hashlib.sha256(known.encode()).hexdigest()[:32]}.json"


def tried_s(
    x: Tensor,
    weight: Tensor,
    *,
    limit_bytes: int | None = None,
    algorithms: Mapping[str, Algorithm] = ALGORITHMS,
    kept: KeptTimes | None = None,
) -> dict[str, float]:
    """Return the seconds of each algorithm for these inputs and weights, by its name.

    One that does not take the shape, or needs more than the limit, has infinite seconds; the latter is not run.

    Args:
        x, weight: inputs with their padding, and weights.
        limit_bytes: bytes that an algorithm may need beside inputs, weights and outputs; None: any number.
        algorithms: algorithms to try, by name.
        kept: times of earlier tries, where those of this one are kept too; None: each algorithm runs.
    """
    known = kept.read(x, weight) if kept is not None else {}
    before = set(known)
    within = {name for name, one in algorithms.items() if _keeps_to_limit(one, x, weight, limit_bytes)}
    for name in algorithms:
        if name in within - before:
            known[name] = time_s(algorithms[name], x, weight)
    if kept is not None and set(known) > before:
        kept.write(x, weight, known)
    return {name: known[name] if name in within else math.inf for name in algorithms}


def fastest(times_s: Mapping[str, float]) -> str | None:
    """Return the name of the fastest algorithm; None if no time is finite."""
    name = min(times_s, key=times_s.__getitem__, default=None)
    return None if name is None or math.isinf(times_s[name]) else name


def _keeps_to_limit(algorithm: Algorithm, x: Tensor, weight: Tensor, limit_bytes: int | None) -> bool:
    try:
        return limit_bytes is None or extra_bytes(algorithm, x, weight) <= limit_bytes
    except RuntimeError:  # it does not take the shape, as Winograd's with kernels that are not square
        return False


def time_s(algorithm: Algorithm, x: Tensor, weight: Tensor) -> float:
    """Return the least seconds of some convolutions, after a first one; infinite if the shape does not fit."""
    taken_s = []
    try:
        algorithm(x, weight)
    except RuntimeError:
        return math.inf
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
