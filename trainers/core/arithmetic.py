"""The arithmetic of torch in a process: rounding of products, and whether equal inputs give equal bits."""

from __future__ import annotations

import os
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
        """Set these in the process, before it builds a task, whose author may set others, and before CUDA starts."""
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
