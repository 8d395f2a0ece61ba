"""What goes over the channel between a worker and a server: a header message, and one of tensors where it has any.

Every exchange is one request and one answer, in order. A request has sections, done in this order, each of which may
be absent:

- `hello`: who is there, and whether it is started anew. The lead's ledger takes it in.
- `push`: a gradient with its origin, in the tensors. To the lead with `orders`: the worker's claim on them.
- `acknowledge`: `[[order_id, loss_sum, read_version, write_version], ...]`: all shards have taken these in. Lead only.
  Within a push to the lead (the only shard) it is done after the push, if the push counts.
- `deposit`, `hand_over`: the names of what the worker's compressor for this shard keeps, with the tensors: a copy, or
  for good, see `residuals`.
- `deposited`, `validated`, `saved`: the report on such an order. Lead only.
- `next`: `{"holding": [order ids], "wait": bool}`: what to do next. Lead only.
- `pull`: `{"min_version": steps, "newer_than": version or null}`: the parameters, in the tensors of the answer.
- `residual`: the copy there is for the worker, in the tensors of the answer, with their `names`; and whether it keeps
  something else (`heard`).
- `snapshot`: values and optimizer state, in the tensors of the answer.
- `tally`: what went over the worker's other connections, and what its compressors keep; see `tally`. Lead only.

The answer has what each section led to; `tensors` says how many tensors come with it, in a message that follows.

Between processes of one machine tensors need not be sent. A worker offers its servers a block of memory. Of what it
sends from there the header says the place (`lent`), and the server uses it where it lies, until it has answered. Of
where parameters are wanted the request says the place too (`pull.place`): the server writes them there, and its answer
says so (`placed`). A worker that only reads them asks for less (`pull.stands_on`: the version that it reads now, -1:
none): the answer says where the server's own are (`found`), which stay as they are until the worker stands on newer
ones. Of its buffers it gets copies also then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    """Send a header and its tensors, which must not change until the handles are done; those in a block that was
    offered must not until the answer is there.
    """
    places = [channel.lend(tensor) for tensor in tensors]
    told: dict[str, Any] = {**meta, "tensors": len(tensors)}
    sent = [tensor for tensor, place in zip(tensors, places, strict=True) if place is None]
    if len(sent) < len(tensors):
        told["lent"] = places
        channel.count_lent(sent_bytes=num_bytes_of(t for t, p in zip(tensors, places, strict=True) if p is not None))
    handles = [channel.isend([], tag=tag, meta=told)]
    if sent:
        handles.append(channel.isend(sent, tag=TENSORS))
    return handles


def result(handle: Handle[Message]) -> Message:
    """The message, however long it takes: that the other end has died is noticed."""
    return handle.future.result()


def finish(handles: Sequence[Handle[None]]) -> None:
    """Return when all has been sent, however long it takes."""
    for handle in handles:
        handle.future.result()


def tensors_of(channel: Channel, header: Message, into: Sequence[Tensor] | None = None) -> list[Tensor]:
    """The tensors that come with a header, in `into` or in memory of their own."""
    places = header.meta.get("lent")
    if places is None:
        return list(result(channel.irecv(into=into, tag=TENSORS)).tensors) if header.meta.get("tensors") else []
    targets: list[Tensor | None] = list(into) if into is not None else [None] * len(places)
    borrowed = borrow(channel, header)
    copied = [
        None if lent is None else (lent.clone() if target is None else target.copy_(lent))
        for lent, target in zip(borrowed, targets, strict=True)
    ]
    return _filled(channel, copied, targets)


def borrowed_tensors(channel: Channel, header: Message) -> list[Tensor]:
    """As `tensors_of`; what the other end has lent is left where it lies, and is its own again with the answer."""
    borrowed = borrow(channel, header)
    return _filled(channel, borrowed, [None] * len(borrowed))


def borrow(channel: Channel, header: Message) -> list[Tensor | None]:
    """Of the tensors that come with a header those that are lent; counts them."""
    borrowed = [None if place is None else channel.borrow(place) for place in header.meta["lent"]]
    channel.count_lent(received_bytes=num_bytes_of(tensor for tensor in borrowed if tensor is not None))
    return borrowed


def _filled(channel: Channel, tensors: Sequence[Tensor | None], targets: Sequence[Tensor | None]) -> list[Tensor]:
    """The tensors, with those in the message that follows in the places of None."""
    wanted = [target for tensor, target in zip(tensors, targets, strict=True) if tensor is None]
    if not wanted:
        return [tensor for tensor in tensors if tensor is not None]
    into = [target for target in wanted if target is not None]
    sent = iter(result(channel.irecv(into=into if len(into) == len(wanted) else None, tag=TENSORS)).tensors)
    return [next(sent) if tensor is None else tensor for tensor in tensors]


def num_bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of their values together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def flat_state(tensors: Mapping[str, Tensor]) -> tuple[list[str], list[Tensor]]:
    """A state as a message: names, and copies of the tensors."""
    return list(tensors), [tensor.detach().clone() for tensor in tensors.values()]


def sparse_to_dense(indices: Tensor, values: Tensor, into: Tensor) -> Tensor:
    """Fill `into` with the values at their places, which are all different, and zeros elsewhere; returns it."""
    with torch.no_grad():
        return into.zero_().index_copy_(0, indices, values)
