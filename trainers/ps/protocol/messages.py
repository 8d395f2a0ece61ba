"""The sending and receiving of headers and their tensors between workers, leaf servers and servers.

A message is a `Header` (see `requests`), and a message of tensors if there are any. Between processes of one machine
tensors need not be sent. A worker offers its servers a block of memory. For tensors in that block the header gives the
places (`lent`), and the server uses them there until it has answered. It also gives the places where the parameters of
a pull are wanted (`wanted`): the server writes them there, and its answer says so (`placed`). If a worker only reads
them (`reads`), the answer gives the place of the server's own values (`found`). They stay unchanged until the worker
reads a newer version. It still gets copies of the buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from orchestray.platform.comm.channel.base import Channel, Handle, Message
from orchestray.platform.comm.channel.blocks import Place
from orchestray.platform.errors import OrchestrayError
from orchestray.platform.process.pulse import PULSE
from orchestray.trainers.ps.protocol.requests import Header, Sections

REQUEST, ANSWER, TENSORS, SNAPSHOT, ENTRY, DONE = "request", "answer", "tensors", "snapshot", "entry", "done"


class ServerError(OrchestrayError):
    """An error of a server that could not do what was requested; the text is the server's."""


def start(
    channel: Channel, tag: str, sections: Sections, tensors: Sequence[Tensor] = (), wanted: Sequence[Place] = ()
) -> list[Handle[None]]:
    """Send a header and its tensors.

    The tensors must not change until the handles are done; those in a block that was offered, until the answer has
    come.

    Args:
        channel: channel to send over.
        tag: kind of message.
        sections: content of the header.
        tensors: tensors that go with the header.
        wanted: places where the tensors of the answer are wanted.
    """
    places = tuple([channel.lend(tensor) for tensor in tensors])
    if not any(place is not None and tensor.numel() for tensor, place in zip(tensors, places, strict=True)):
        places = (None,) * len(tensors)  # an empty tensor is in every block, and alone it is not lent
    sent = [tensor for tensor, place in zip(tensors, places, strict=True) if place is None]
    lent = places if len(sent) < len(tensors) else ()
    if lent:
        channel.count_lent(sent_bytes=num_bytes_of([t for t, p in zip(tensors, places, strict=True) if p is not None]))
    handles = [channel.isend([], tag=tag, meta=Header(sections, len(tensors), lent, tuple(wanted)).encode())]
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


def tensors_of(
    channel: Channel, header: Header[Any], into: Sequence[Tensor] | None = None, *, borrows: bool = False
) -> list[Tensor]:
    """Return the tensors that come with a header.

    Args:
        channel: channel that the header came over.
        header: the header.
        into: memory for the tensors; default: new memory.
        borrows: True to leave lent tensors in the other end's memory, where they do not change until the answer.
    """
    places = header.lent or (None,) * header.num_tensors
    targets: Sequence[Tensor | None] = (None,) * len(places) if into is None else into
    found = [None if place is None else channel.borrow(place) for place in places]
    if header.lent:
        channel.count_lent(received_bytes=num_bytes_of([tensor for tensor in found if tensor is not None]))
    if not borrows:
        pairs = zip(found, targets, strict=True)
        found = [lent if lent is None else (lent.clone() if to is None else to.copy_(lent)) for lent, to in pairs]
    missing = [target for tensor, target in zip(found, targets, strict=True) if tensor is None]
    if not missing:
        return [tensor for tensor in found if tensor is not None]
    given = [target for target in missing if target is not None]
    sent = iter(result(channel.irecv(into=given if len(given) == len(missing) else None, tag=TENSORS)).tensors)
    return [next(sent) if tensor is None else tensor for tensor in found]


def num_bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all values."""
    return sum([tensor.nbytes for tensor in tensors])


def flat_state(tensors: Mapping[str, Tensor]) -> tuple[tuple[str, ...], list[Tensor]]:
    """Return a state as a message: names, and copies of the tensors."""
    return tuple(tensors), [tensor.detach().clone() for tensor in tensors.values()]
