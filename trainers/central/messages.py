"""What goes over the channel between a worker and a server: a header message, and one of tensors where it has any.

Every exchange is one request and one answer, in order. A request has sections, done in this order, each of which may
be absent:

- `hello`: who is there, and whether it is started anew. The lead's ledger takes it in.
- `push`: a gradient with its origin, in the tensors. To the lead with `orders`: the worker's claim on them.
- `acknowledge`: `[[order_id, loss_sum, read_version, write_version], ...]`: all shards have taken these in. Lead only.
  Within a push to the lead (the only shard) it is done after the push, if the push counts.
- `validated`, `saved`: the report on such an order. Lead only.
- `next`: `{"holding": [order ids], "wait": bool}`: what to do next. Lead only.
- `pull`: `{"min_version": steps, "newer_than": version or null}`: the parameters, in the tensors of the answer.
- `snapshot`: values and optimizer state, in the tensors of the answer.
- `tally`: what went over the worker's other connections, and what its compressors keep; see `tally`. Lead only.

The answer has what each section led to; `tensors` says whether a message of tensors follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from orchestray.platform.channel.base import Channel, Handle, Message
from orchestray.platform.errors import OrchestrayError

REQUEST, ANSWER, TENSORS, SNAPSHOT, ENTRY, DONE = "request", "answer", "tensors", "snapshot", "entry", "done"

DENSE, SPARSE, RUNS, COMPRESSED = "dense", "sparse", "runs", "compressed"


class ServerError(OrchestrayError):
    """A server could not do what it was asked; the text is its own."""


def start(channel: Channel, tag: str, meta: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> list[Handle[None]]:
    """Send a header and its tensors, which must not change until the handles are done."""
    handles = [channel.isend([], tag=tag, meta={**meta, "tensors": len(tensors)})]
    if tensors:
        handles.append(channel.isend(tensors, tag=TENSORS))
    return handles


def result(handle: Handle[Message]) -> Message:
    """The message, however long it takes: that the other end has died is noticed."""
    return handle.future.result()


def finish(handles: Sequence[Handle[None]]) -> None:
    """Return when all has been sent, however long it takes."""
    for handle in handles:
        handle.future.result()


def tensors_of(channel: Channel, header: Message, into: Sequence[Tensor] | None = None) -> list[Tensor]:
    """The tensors that follow a header; `into` says where to."""
    if not header.meta.get("tensors"):
        return []
    return list(result(channel.irecv(into=into, tag=TENSORS)).tensors)


def flat_state(tensors: Mapping[str, Tensor]) -> tuple[list[str], list[Tensor]]:
    """A state as a message: names, and copies of the tensors."""
    return list(tensors), [tensor.detach().clone() for tensor in tensors.values()]


def sparse_to_dense(indices: Tensor, values: Tensor, into: Tensor) -> Tensor:
    """Fill `into` with the values at their places, which are all different, and zeros elsewhere; returns it."""
    with torch.no_grad():
        return into.zero_().index_copy_(0, indices, values)
