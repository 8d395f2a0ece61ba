"""The arithmetic of torch in a process: rounding of products, and whether equal inputs give equal bits."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Variable without which cuBLAS may add up in another order each time; it is read when CUDA starts in a process."""
_WORKSPACE_VALUE = ":4096:8"


@dataclass(frozen=True)
class Arithmetic:
    """The settings of torch that decide on bits, the same in all processes of a run.

    Attributes:
        deterministic: True to use only operations that give the same bits each time on a GPU.
        float32_matmul_precision: as in `torch.set_float32_matmul_precision`; `highest` also keeps TF32 out of
            convolutions, where torch allows it otherwise.
        cudnn_benchmark: True to let cuDNN choose algorithms by their time.
    """

    deterministic: bool = False
    float32_matmul_precision: str = "highest"
    cudnn_benchmark: bool = False

    def apply(self) -> None:
        """Set these in the process, before it builds a task, whose author may set others, and before CUDA starts.

        Settings of earlier tasks in the process are undone; `kept_settings` makes those of this one again.
        """
        if torch.get_default_dtype() != torch.float32:
            torch.set_default_dtype(torch.float32)
        if self.deterministic:
            os.environ.setdefault(WORKSPACE, _WORKSPACE_VALUE)
        # Setting it imports a part of torch's compiler.
        if torch.are_deterministic_algorithms_enabled() != self.deterministic:
            torch.use_deterministic_algorithms(self.deterministic)
        torch.set_float32_matmul_precision(self.float32_matmul_precision)
        cudnn = torch.backends.cudnn
        cudnn.allow_tf32 = self.float32_matmul_precision != "highest"
        cudnn.deterministic, cudnn.benchmark = self.deterministic, self.cudnn_benchmark


def arithmetic_here() -> dict[str, Any]:
    """Return what holds in this process, which a task may have changed, as JSON values."""
    cudnn: Any = torch.backends.cudnn
    held = Arithmetic(torch.are_deterministic_algorithms_enabled(), _matmul_precision(), bool(cudnn.benchmark))
    return {**asdict(held), "cudnn_tf32": cudnn.conv.fp32_precision == "tf32"}


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # a task has set `fp32_precision` of some backend, after which torch has no name for the whole
        on_gpu: Any = torch.backends.cuda.matmul
        return "high" if on_gpu.fp32_precision == "tf32" else "highest"


_set_by: dict[Hashable, dict[str, Any]] = {}
"""Settings that blocks of `kept_settings` have made in this process, by their keys."""


@contextlib.contextmanager
def kept_settings(*key: Hashable) -> Iterator[None]:
    """Set again, before a block, the settings of torch that it made when it last ran in this process.

    A process imports a module once, and a search builds a task once for many trials. So what these set would hold for
    the first trial of each process alone, as `Arithmetic.apply` precedes each.

    Args:
        key: identifies the block.
    """
    known = _set_by.get(key, {})
    _set(known)
    before = _held()
    yield
    if changed := _differing(_held(), before):
        _set_by[key] = {**known, **changed}


@contextlib.contextmanager
def settings_given_back() -> Iterator[None]:
    """Undo after a block, in a user's own process, what it has changed of the settings of torch."""
    before = _held()
    try:
        yield
    finally:
        _set(_differing(before, _held()))


def _differing(settings: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value != others[name]}


def _set(settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        _SETTERS[name](value)


def _held() -> Mapping[str, Any]:
    """Return the settings of torch that a task may change, by the name of their setter."""
    cudnn: Any = torch.backends.cudnn
    return {
        "default_dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": _matmul_precision(),
        "cudnn_tf32": cudnn.conv.fp32_precision,
        "cudnn_deterministic": cudnn.deterministic,
        "cudnn_benchmark": cudnn.benchmark,
    }


def _set_cudnn_tf32(value: str) -> None:
    cudnn: Any = torch.backends.cudnn
    cudnn.conv.fp32_precision = value


_SETTERS: Mapping[str, Callable[[Any], object]] = {
    "default_dtype": torch.set_default_dtype,
    "deterministic": torch.use_deterministic_algorithms,
    "matmul_precision": torch.set_float32_matmul_precision,
    "cudnn_tf32": _set_cudnn_tf32,
    "cudnn_deterministic": lambda value: setattr(torch.backends.cudnn, "deterministic", value),
    "cudnn_benchmark": lambda value: setattr(torch.backends.cudnn, "benchmark", value),
}
