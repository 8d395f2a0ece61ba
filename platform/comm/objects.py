"""Exchange of objects among replicas, so that all continue from the state of the one that is farthest ahead."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestray.platform.comm.collective import Collective

NO_STATE = -1
_SMALL_BYTES = 1 << 16
"""Size up to which tensors are sent together: on its own, each would take longer to announce than to send."""


def farthest(collective: Collective, step: int) -> tuple[int, list[int]]:
    """Gather every replica's completed step (`NO_STATE` for a replica that has none).

    Returns:
        The lowest rank among those farthest ahead, and the step of each rank.
    """
    listed = collective.all_gather(torch.tensor([step])).flatten().tolist()
    return listed.index(max(listed)), listed


def share_json(collective: Collective, value: Any, source: int) -> Any:
    """Return the JSON value of rank `source` on every rank; the values of the others are ignored."""
    payload = json.dumps(value).encode() if collective.rank == source else b""
    size = torch.tensor([len(payload)], dtype=torch.int64)
    collective.broadcast(size, source)
    buffer = torch.frombuffer(bytearray(payload or bytes(int(size))), dtype=torch.uint8)
    collective.broadcast(buffer, source)
    return json.loads(bytes(buffer.numpy().tobytes()))


def share_tensors(collective: Collective, tensors: Mapping[str, Tensor] | None, source: int) -> dict[str, Tensor]:
    """Return the named tensors of rank `source` on every rank, with their dtypes and shapes, on the CPU."""
    held = dict(tensors or {})
    described = [[name, str(held[name].dtype).removeprefix("torch."), list(held[name].shape)] for name in held]
    described = share_json(collective, described, source)
    if collective.rank == source:
        result = {name: _plain(held[name]) for name in held}
    else:
        result = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in described}
    small = [tensor for tensor in result.values() if tensor.nbytes <= _SMALL_BYTES]
    if small:
        packed = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in small])
        collective.broadcast(packed, source)
        for tensor, part in zip(small, torch.split(packed, [tensor.nbytes for tensor in small]), strict=True):
            if collective.rank != source:
                tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))  # a view wants it aligned
    for tensor in result.values():
        if tensor.nbytes > _SMALL_BYTES:
            collective.broadcast(tensor, source)
    return result


def _plain(tensor: Tensor) -> Tensor:
    """Return the tensor on the CPU, with its values as they are in its memory."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def gather_json(collective: Collective, value: Any) -> list[Any]:
    """Return the JSON values of all ranks, in rank order, on every rank."""
    payload = json.dumps(value).encode()
    sizes = collective.all_gather(torch.tensor([len(payload)])).flatten().tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    rows = collective.all_gather(padded)
    return [json.loads(bytes(row[:size].numpy().tobytes())) for row, size in zip(rows, sizes, strict=True)]
