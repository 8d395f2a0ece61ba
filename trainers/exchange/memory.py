"""What a worker's memory holds of a model between steps, by the parts that ZeRO shards."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from orchestray.trainers.exchange.base import Exchange
from orchestray.trainers.optimizers import Optimizer


def held_bytes(exchange: Exchange, optimizer: Optimizer) -> dict[str, int]:
    """Bytes allocated for parameters (and buffers), gradients and the optimizer's state, after `exchange.finish`.

    Counted are whole allocations, each once: of a tensor that is a view, what it is a view of. (Rajbhandari et al.,
    SC 2020, section 3: with Psi parameters of 4 bytes, 4 Psi + 4 Psi + 8 Psi for Adam, of which N replicas hold 1/N of
    the third, the second and third, or all three.)
    """
    return {
        "parameters": _allocated(held.tensor for held in exchange.held().values()),
        "gradients": _allocated(gradient for gradient in exchange.gradients() if gradient is not None),
        "optimizer": _allocated(optimizer.state_tensors().values()),
    }


def _allocated(tensors: Iterable[Tensor]) -> int:
    storages = {tensor.untyped_storage() for tensor in tensors if tensor.numel()}
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
