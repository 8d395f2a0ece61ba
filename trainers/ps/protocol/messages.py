"""The sending and receiving of headers and their tensors between workers, leaf servers and servers.

A `Link` is the end of a worker or a leaf server: it keeps requests until they are answered, and sends them again to a
server that replaces a lost one. A `RequestServer` is the other end.

A message is a `Header` (see `requests`), and a message of tensors if there are any. Between processes of one machine
tensors need not be sent. A worker offers its servers a block of memory. For tensors in that block the header gives the
places (`lent`), and the server uses them there until it has answered. It also gives the places where the parameters of
a pull are wanted (`wanted`): the server writes them there, and its answer says so (`placed`). If a worker only reads
them (`reads`), the answer gives the place of the server's own values (`found`). They stay unchanged until the worker
reads a newer version. It still gets copies of the buffers.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from orchestray.platform.comm.channel.base import Channel, ChannelClosedError, Handle, Message
from orchestray.platform.comm.channel.blocks import Place, SharedBlock
from orchestray.platform.data.mark import refuse_other_marks
from orchestray.platform.errors import OrchestrayError, TrainingError
from orchestray.platform.process.pulse import PULSE
from orchestray.trainers.ps.protocol.requests import Answer, Header, Hello, Request, Sections

REQUEST, ANSWER, TENSORS = "request", "answer", "tensors"
SNAPSHOT, ENTRY, DONE, PROMOTED = "snapshot", "entry", "done", "promoted"


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


@dataclass(eq=False)
class Asked:
    """A request in progress."""

    link: Link
    request: Request
    sent: Sequence[Tensor]
    """Tensors of the request, which must not change until it is answered."""
    into: Sequence[Tensor] | None
    always: bool
    """True if every answer brings tensors for `into`; they are then received before anything waits for them."""
    answer: Answer | None = None
    tensors: Sequence[Tensor] = ()
    handles: list[Handle[None]] = field(default_factory=list)
    header: Handle[Message] | None = None
    payload: Handle[Message] | None = None

    def wait(self) -> Answer:
        """Wait for the answer and return it.

        Raises:
            ServerError: the server could not do it, and says why.
            ChannelClosedError: the server is lost, and no other replaces it.
        """
        while self.answer is None:
            self.link.finish_first()
        if self.answer.error is not None:
            raise ServerError(self.answer.error)
        return self.answer

    def done(self) -> bool:
        """Return True if `wait` would return, or raise, soon."""
        return self.answer is not None or (self.header is not None and self.header.done())


class Link:
    """A connection to one shard, which survives the replacement of the shard's server."""

    def __init__(
        self,
        shard: int,
        channel: Channel,
        worker: int,
        *,
        replace: Callable[[int, Exception], Channel] | None,
        block: SharedBlock | None = None,
    ) -> None:
        self._shard = shard
        self._channel = channel
        self._block = block
        self._worker = worker
        self._replace = replace
        self._unanswered: deque[Asked] = deque()
        self._bytes_of_earlier = 0
        with suppress(ChannelClosedError):  # the first request handles it
            self._offer()

    def hello(self, *, is_new: bool, data: Mapping[str, list[int]] | None = None) -> Request:
        """Return the request that introduces the worker, with the marks of its data if it has just started."""
        return Request(hello=Hello(self._worker, is_new, dict(data or {})))

    def ask(
        self,
        request: Request,
        tensors: Sequence[Tensor] = (),
        *,
        into: Sequence[Tensor] | None = None,
        always: bool = True,
    ) -> Asked:
        """Send a request; answers come in the order of the requests.

        Args:
            request: request to send.
            tensors: tensors that go with it; they must not change until it is answered.
            into: memory for the answer's tensors.
            always: True if every answer brings tensors for `into`.
        """
        asked = Asked(self, request, tensors, into, always)
        self._unanswered.append(asked)
        try:
            self._start(asked)
        except ChannelClosedError as error:
            self._recover(error)
        return asked

    def finish_first(self) -> None:
        """Wait for the answer to the oldest request."""
        asked = self._unanswered[0]
        try:
            self._finish(asked)
        except ChannelClosedError as error:
            self._recover(error)
            return
        self._unanswered.popleft()

    def reconnect(self, channel: Channel) -> None:
        """Continue over another channel, and send again what was not answered."""
        self._bytes_of_earlier += self._channel.bytes_sent
        self._channel.close()
        self._channel = channel
        self._offer()
        greeting = Asked(self, self.hello(is_new=False), (), None, always=True)
        again = [asked for asked in self._unanswered if asked.request.hello is None]
        for asked in self._unanswered:
            if asked.request.hello is not None:
                greeting = asked
        self._unanswered = deque([greeting, *again])
        for asked in self._unanswered:
            self._start(asked)

    @property
    def bytes_sent(self) -> int:
        return self._bytes_of_earlier + self._channel.bytes_sent

    @property
    def bytes_moved(self) -> int:
        """Number of bytes sent and received over the present channel, and sent over the earlier ones."""
        return self.bytes_sent + self._channel.bytes_received

    def close(self) -> None:
        self._channel.close()

    def _offer(self) -> None:
        if self._block is not None:
            self._channel.offer(self._block)

    def _start(self, asked: Asked) -> None:
        # The receives begin now, so that a large answer arrives while the worker computes.
        channel, request = self._channel, asked.request
        found = [] if request.pull is None else [channel.lend(tensor) for tensor in asked.into or ()]
        places = [place for place in found if place is not None]
        is_placed = bool(found) and len(places) == len(found)
        asked.handles = start(channel, REQUEST, request, asked.sent, places if is_placed else ())
        asked.header = channel.irecv(tag=ANSWER)
        asked.payload = None
        if asked.into is not None and asked.always and not is_placed:
            asked.payload = self._channel.irecv(into=asked.into, tag=TENSORS)

    def _finish(self, asked: Asked) -> None:
        assert asked.header is not None
        header = Header.decode(Answer, result(asked.header).content)
        answer = header.sections
        if answer.placed:
            assert asked.into is not None
            asked.tensors = asked.into
            if answer.found is not None:
                asked.tensors = [self._channel.borrow(answer.found), *asked.into[1:]]
            self._channel.count_lent(received_bytes=num_bytes_of(asked.into))
        elif header.num_tensors:
            payload = asked.payload or self._channel.irecv(into=asked.into, tag=TENSORS)
            asked.tensors = result(payload).tensors
        elif asked.payload is not None:
            asked.payload.cancel()  # the answer is an error
        for handle in asked.handles:
            handle.future.result()
        asked.answer = answer

    def _recover(self, error: ChannelClosedError) -> None:
        """Connect to another server instead of the lost one; raise the error if there is none."""
        failure: ChannelClosedError = error
        while self._replace is not None:
            channel = self._replace(self._shard, failure)  # raises if no server replaces it
            try:
                self.reconnect(channel)
            except ChannelClosedError as again:
                failure = again
            else:
                return
        raise failure


class RequestServer(ABC):
    """A server that answers the requests of each channel in a thread of its own."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        """Lock of the server, notified when something has changed that a request may wait for."""
        self._channels: set[Channel] = set()
        self._closed = False
        self._first: Hello | None = None
        """Greeting of the first worker that has said what its data are."""

    def serve(self, channel: Channel) -> int | None:
        """Answer a worker until its channel ends. Blocks.

        Returns:
            The worker's number; None if it sent no `hello`.
        """
        worker: int | None = None
        with self._changed:
            self._channels.add(channel)
            if self._closed:
                channel.close()
        try:
            asked = channel.irecv()
            while True:
                header = Header.decode(Request, result(asked).content)
                if header.sections.hello is not None:
                    worker = header.sections.hello.worker
                self._compare(header.sections.hello)
                asked = self._serve_one(channel, worker, header)
        except ChannelClosedError:
            pass
        except TrainingError as error:  # a message that cannot be understood, and so nothing after it
            with suppress(ChannelClosedError):
                finish(start(channel, ANSWER, Answer(error=str(error))))
        finally:
            channel.close()
            with self._changed:
                self._channels.discard(channel)
            self._gone(worker, channel)
        return worker

    def _compare(self, hello: Hello | None) -> None:
        """Raise TrainingError if a worker's data are not those of the first one."""
        if hello is not None and hello.data:
            with self._changed:
                first = self._first = self._first or hello
            refuse_other_marks(hello.worker, hello.data, first.worker, first.data)

    @abstractmethod
    def _serve_one(self, channel: Channel, worker: int | None, header: Header[Request]) -> Handle[Message]:
        """Answer one request; return the receive of the next."""

    @abstractmethod
    def _gone(self, worker: int | None, channel: Channel) -> None:
        """Handle the end of a channel; the server is not locked."""

    def _wake(self, _: object) -> None:
        with self._changed:
            self._changed.notify_all()

    def _hang_up(self) -> None:
        """End every channel, and every later one at once."""
        with self._changed:
            self._closed = True
            channels = list(self._channels)
            self._changed.notify_all()
        for channel in channels:
            channel.close()
