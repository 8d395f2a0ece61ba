"""The memory of a worker for a model between steps, by the parts that ZeRO shards."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from orchestray.trainers.core.exchange import Exchange
from orchestray.trainers.optim.optimizers import Optimizer


def held_bytes(exchange: Exchange, optimizer: Optimizer) -> dict[str, int]:
    """Return the bytes allocated for parameters (and buffers), gradients and optimizer state, after `exchange.finish`.

    Whole allocations are counted, each once; a view counts as its base. Rajbhandari et al., SC 2020, section 3, with
    Psi parameters of 4 bytes, count 4 Psi + 4 Psi + 8 Psi for Adam. N replicas hold 1/N of the third, of the second and
    third, or of all three.
    """
    return {
        "parameters": _allocated(held.tensor for held in exchange.held().values()),
        "gradients": _allocated(gradient for gradient in exchange.gradients() if gradient is not None),
        "optimizer": _allocated(optimizer.state_tensors().values()),
    }


def _allocated(tensors: Iterable[Tensor]) -> int:
    storages = {tensor.untyped_storage() for tensor in tensors if tensor.numel()}
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
