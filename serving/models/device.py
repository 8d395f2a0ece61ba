"""The device of a model, and the transfer of batches to it and back; the same code for CPU and GPU. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchestray.platform.errors import ConfigError
from orchestray.platform.process.gpu import current_gpu
from orchestray.serving.models.signature import Tensors, TensorSpec


def chosen_device(num_gpus: float) -> torch.device:
    """Return the GPU, with its index, if one is asked for, else the CPU.

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
    return current_gpu()


class Transfer:
    """The transfer of batches to a device, and of answers back.

    On a GPU it uses pinned memory and a stream of its own, so that copies overlap the work of other streams. On a CPU a
    batch is stacked in place and copied only once.
    """

    def __init__(self, specs: Sequence[TensorSpec], device: torch.device) -> None:
        self.device = device
        self._specs = specs
        self._is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None  # type: ignore[no-untyped-call]

    @property
    def stream(self) -> Any:
        """Context in which to call the model: its stream, or nothing on a CPU."""
        return torch.cuda.stream(self._stream)

    def stack(self, samples: Sequence[Tensors], size: int) -> dict[str, Tensor]:
        """Stack the tensors of samples of one shape by name, [size, ...]; rows beyond them repeat the first one."""
        batch = {}
        for spec in self._specs:
            rows = [sample[spec.name] for sample in samples]
            rows += [rows[0]] * (size - len(samples))
            host = torch.empty((size, *rows[0].shape), dtype=getattr(torch, spec.dtype), pin_memory=self._is_cuda)
            np.stack(rows, out=host.numpy())
            batch[spec.name] = host.to(self.device, non_blocking=True)
        return batch

    def fetch(self, outputs: Mapping[str, Tensor], num_samples: int) -> Tensors:
        """Return the answers as arrays, [num_samples, ...], in dtypes that numpy supports."""
        arrays = {}
        for name, tensor in outputs.items():
            tensor = tensor[:num_samples].detach()
            if tensor.dtype in {torch.bfloat16, torch.float16}:
                tensor = tensor.float()
            arrays[name] = tensor.to("cpu", non_blocking=self._is_cuda)
        if self._stream is not None:
            self._stream.synchronize()
        return {name: tensor.numpy() for name, tensor in arrays.items()}
