"""The messages between a worker and a server: a header, and a message of tensors if there are any.

Every exchange is one request and one answer, in order. A request has sections, processed in this order, each of which
may be absent:

- `hello`: the worker, and whether it has just started. The lead's coordinator registers it.
- `push`: a gradient with its origin, in the tensors. To the lead with `orders`: the worker's claim on them.
- `acknowledge`: `[[order_id, loss_sum, read_version, write_version], ...]`: all shards have applied these. Lead only.
  Within a push to the lead (the only shard) it is done after the push, if the push counts.
- `deposit`, `hand_over`: the names of the state of the worker's compressor for this shard, with the tensors: a copy, or
  for good, see `residuals`.
- `deposited`, `validated`, `saved`: the report on such an order. Lead only.
- `next`: `{"holding": [order ids], "wait": bool}`: asks for the next order. Lead only.
- `pull`: `{"min_version": steps, "newer_than": version or null}`: the parameters, in the tensors of the answer.
- `residual`: the shard's copy of the state of the worker's compressor, in the tensors of the answer, with their
  `names`; and whether the worker has a state that the shard has no copy of (`heard`).
- `snapshot`: values and optimizer state, in the tensors of the answer.
- `tally`: bytes over the worker's other connections, and the norm of its compressors' residuals; see `traffic_counter`.
  Lead only.

The answer has the result of each section; `tensors` says how many tensors come with it, in a message that follows.

Between processes of one machine tensors need not be sent. A worker offers its servers a block of memory. For tensors in
that block the header gives the place (`lent`), and the server uses them there until it has answered. The request also
gives the place where parameters are wanted (`pull.place`): the server writes them there, and its answer says so
(`placed`). A worker that only reads them sends `pull.reads`: the version that it reads now, -1: none. The answer
then gives the place of the server's own values (`found`), which stay unchanged until the worker reads a newer
version. It still gets copies of the buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from orchestray.platform.comm.channel.base import Channel, Handle, Message
from orchestray.platform.errors import OrchestrayError
from orchestray.platform.process.pulse import PULSE

REQUEST, ANSWER, TENSORS, SNAPSHOT, ENTRY, DONE = "request", "answer", "tensors", "snapshot", "entry", "done"

DENSE, SPARSE, RUNS, COMPRESSED = "dense", "sparse", "runs", "compressed"


class ServerError(OrchestrayError):
    """An error of a server that could not do what was requested; the text is the server's."""


def start(channel: Channel, tag: str, meta: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> list[Handle[None]]:
    """Send a header and its tensors.

    The tensors must not change until the handles are done; those in a block that was offered, until the answer has
    come.

    Args:
        channel: channel to send over.
        tag: kind of message.
        meta: header, as JSON values.
        tensors: tensors that go with the header.
    """
    places = [channel.lend(tensor) for tensor in tensors]
    header: dict[str, Any] = {**meta, "tensors": len(tensors)}
    sent = [tensor for tensor, place in zip(tensors, places, strict=True) if place is None]
    if len(sent) < len(tensors):
        header["lent"] = places
        channel.count_lent(sent_bytes=num_bytes_of(t for t, p in zip(tensors, places, strict=True) if p is not None))
    handles = [channel.isend([], tag=tag, meta=header)]
    if sent:
        handles.append(channel.isend(sent, tag=TENSORS))
    return handles


def result(handle: Handle[Message]) -> Message:
    """Wait for a message and return it, however long it takes; raise if the other end dies."""
    with PULSE.waiting():
        return handle.future.result()


def finish(handles: Sequence[Handle[None]]) -> None:
    """Wait until everything has been sent, however long it takes."""
    with PULSE.waiting():
        for handle in handles:
            handle.future.result()


def tensors_of(channel: Channel, header: Message, into: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Return the tensors that come with a header, in `into` or in new memory."""
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
    """Return the tensors of a header, with those that are lent left in the other end's memory until the answer."""
    borrowed = borrow(channel, header)
    return _filled(channel, borrowed, [None] * len(borrowed))


def borrow(channel: Channel, header: Message) -> list[Tensor | None]:
    """Return the lent tensors of a header, with None for those that are sent; count their bytes."""
    borrowed = [None if place is None else channel.borrow(place) for place in header.meta["lent"]]
    channel.count_lent(received_bytes=num_bytes_of(tensor for tensor in borrowed if tensor is not None))
    return borrowed


def _filled(channel: Channel, tensors: Sequence[Tensor | None], targets: Sequence[Tensor | None]) -> list[Tensor]:
    """Replace each None by the next tensor of the message that follows."""
    wanted = [target for tensor, target in zip(tensors, targets, strict=True) if tensor is None]
    if not wanted:
        return [tensor for tensor in tensors if tensor is not None]
    into = [target for target in wanted if target is not None]
    sent = iter(result(channel.irecv(into=into if len(into) == len(wanted) else None, tag=TENSORS)).tensors)
    return [next(sent) if tensor is None else tensor for tensor in tensors]


def num_bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all values."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def flat_state(tensors: Mapping[str, Tensor]) -> tuple[list[str], list[Tensor]]:
    """Return a state as a message: names, and copies of the tensors."""
    return list(tensors), [tensor.detach().clone() for tensor in tensors.values()]


def sparse_to_dense(indices: Tensor, values: Tensor, into: Tensor) -> Tensor:
    """Fill `into` with the values at their places, which are all different, and zeros elsewhere; return it."""
    with torch.no_grad():
        return into.zero_().index_copy_(0, indices, values)
