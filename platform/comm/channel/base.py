"""The contract of every channel: it carries tensors between two endpoints, with a timeout and counted bytes.

A channel is ordered, reliable and two-way. One call of `send` is one message: one or more tensors, with a short `tag`
and a small `meta` in its header: JSON values, or bytes that mean something to both ends. The receiver can thus learn
from a message what it is. The other end receives messages in the order they were sent.

- **Sending.** `send` returns when the tensors may be changed again. It may have to wait until the other end receives,
  so two ends that both send first and then receive must use `isend`. A `send` that times out closes the channel,
  because part of the message may have left.
- **Receiving.** `recv()` makes new tensors from the header. `into=` fills given ones in place. A message that does not
  fit raises ChannelMismatchError, is taken off the channel, and leaves `into` and the channel as they were.
- **Timeouts.** A `recv` that times out leaves the channel as it was, unless a large message was half-way in: then the
  channel is closed. A handle whose `wait` times out stays pending, and may be waited for again.
- **Death.** When the peer closes or dies, messages that had arrived completely can still be received. After that every
  call, including pending ones, raises ChannelClosedError at once.
- **Lending.** Between processes of one machine a tensor can be sent without a copy. One end offers a block of memory
  (`offer`), which both ends share from then on. Either end sends the place of a tensor in it (`lend`) in the `meta` of
  a message, and the other uses the tensor there (`borrow`). The two agree by messages who may write to it and until
  when. Channels that cannot lend say so, and the tensors are sent.
- **Bytes.** `bytes_sent` and `bytes_received` count the tensors' own bytes, so they equal an algorithm's formula;
  `overhead_bytes_sent` counts headers.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from torch import Tensor

from orchestray.platform.errors import OrchestrayError
from orchestray.platform.process.pulse import PULSE

if TYPE_CHECKING:
    from orchestray.platform.comm.channel.blocks import Place, SharedBlock

DEFAULT_TIMEOUT_S = 60.0
CLOSED_HERE = "it was closed at this end"
GONE = "the peer closed it or died"

Tensors = Tensor | Sequence[Tensor]
Meta = Mapping[str, Any] | bytes | None
Result = TypeVar("Result")


class ChannelError(OrchestrayError):
    """An error between two endpoints; the text names both."""


class ChannelTimeoutError(ChannelError, TimeoutError):
    """Raised when the other end did not answer in time."""


class ChannelClosedError(ChannelError, ConnectionError):
    """Raised when the channel is closed: by this end, by the other, or because the other died."""


class ChannelMismatchError(ChannelError, ValueError):
    """Raised when a message does not fit the request: it has another tag, number of tensors, shape or dtype."""


@dataclass(frozen=True)
class Message:
    """The content of one `send`.

    `tensors` are those given as `into`, if any; else new ones on the CPU.
    """

    tensors: tuple[Tensor, ...]
    tag: str = ""
    content: bytes = b"{}"
    """The `meta`, as it was sent."""

    @cached_property
    def meta(self) -> Mapping[str, Any]:
        """The JSON values that were sent."""
        found: Mapping[str, Any] = json.loads(self.content)
        return found

    @property
    def tensor(self) -> Tensor:
        """Only tensor of the message; raises ChannelMismatchError if it has none or several."""
        if len(self.tensors) != 1:
            raise ChannelMismatchError(
                f"message {self.tag!r} carries {len(self.tensors)} tensors, not one; use .tensors"
            )
        return self.tensors[0]


@dataclass(frozen=True)
class Request:
    """The request of a receiver."""

    targets: tuple[Tensor, ...] | None
    """Tensors to fill; None: it accepts any tensors."""
    tag: str | None

    @classmethod
    def of(cls, into: Tensors | None, tag: str | None) -> Request:
        """Return a request with the arguments of `Channel.irecv`."""
        return cls(None if into is None else as_tuple(into), tag)


@dataclass(eq=False)
class Handle(Generic[Result]):
    """A pending send or receive.

    `future` is for `concurrent.futures.wait` over several channels (not on a simulated network).
    """

    future: Future[Result]
    waiting: str
    """Beginning of a timeout's message."""
    timeout_s: float

    def wait(self, timeout_s: float | None = None) -> Result:
        """Wait for the result and return it.

        Raises:
            ChannelTimeoutError: not done after `timeout_s` (default: the channel's); the operation stays pending.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            with PULSE.waiting():
                return self.future.result(limit_s)
        except TimeoutError:
            if self.future.done():  # it raised a TimeoutError itself, or ended right at the deadline
                return self.future.result()
            raise ChannelTimeoutError(f"{self.waiting}: nothing within {limit_s:g} s") from None

    def done(self) -> bool:
        """Return True if `wait` would return, or raise, at once."""
        return self.future.done()

    def cancel(self) -> bool:
        """Cancel a receive whose message has not begun to arrive; return True if it was cancelled."""
        return self.future.cancel()


class Channel(ABC):
    """One end of a channel; the module's docstring is its contract. It is a context manager that closes the channel.

    `name` and `peer` are the names of the two ends in errors, and `timeout_s` is the default of every wait. Several
    threads may use an end.
    """

    lends = False
    """True if `offer` accepts blocks."""

    def __init__(self, name: str, peer: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.name = name
        self.peer = peer
        self.timeout_s = timeout_s
        self.bytes_sent = 0
        self.bytes_received = 0
        self.overhead_bytes_sent = 0
        self.messages_sent = 0
        self.messages_received = 0

    @property
    def bytes_moved(self) -> int:
        """Number of bytes sent and received."""
        return self.bytes_sent + self.bytes_received

    @abstractmethod
    def isend(self, tensors: Tensors, *, tag: str = "", meta: Meta = None) -> Handle[None]:
        """Start a send; the tensors must not change until the handle is done.

        Args:
            tensors: one or more dense tensors.
            tag: short name of the message.
            meta: any mapping that JSON can represent, or bytes.

        Raises:
            ChannelClosedError: the channel is already closed.
            TypeError: a tensor is sparse or quantized.
        """

    @abstractmethod
    def irecv(self, *, into: Tensors | None = None, tag: str | None = None) -> Handle[Message]:
        """Start a receive; receives are served in the order they were started.

        Args:
            into: tensors to fill in place.
            tag: expected tag; a message with another tag is a mismatch.
        """

    @abstractmethod
    def close(self) -> None:
        """Close both directions, and end pending operations with ChannelClosedError; may be called twice."""

    def offer(self, block: SharedBlock) -> bool:
        """Share a block of memory with the other end; return False if this channel cannot.

        The block must not be closed before the next message was sent.

        Raises:
            ChannelClosedError: the channel is closed.
        """
        return False

    def lend(self, tensor: Tensor) -> Place | None:
        """Return the place (JSON for `meta`) of a tensor in a block that either end offered; None if in no block."""
        return None

    def borrow(self, place: Place) -> Tensor:
        """Return the tensor at a place sent by the other end; its memory stays shared as long as it is referenced."""
        raise ChannelMismatchError(f"{self.peer} lent {self.name} a tensor over a channel that lends none")

    def count_lent(self, *, sent_bytes: int = 0, received_bytes: int = 0) -> None:
        """Count bytes of lent tensors, which one end wrote and the other read in place, as if they had been sent."""
        return

    def send(self, tensors: Tensors, *, tag: str = "", meta: Meta = None, timeout_s: float | None = None) -> None:
        """Send one message, and wait until the tensors may be changed again."""
        try:
            self.isend(tensors, tag=tag, meta=meta).wait(timeout_s)
        except ChannelTimeoutError:
            self.close()
            raise

    def recv(self, *, into: Tensors | None = None, tag: str | None = None, timeout_s: float | None = None) -> Message:
        """Wait for the next message and return it."""
        handle = self.irecv(into=into, tag=tag)
        try:
            return handle.wait(timeout_s)
        except ChannelTimeoutError:
            if handle.cancel():
                raise
            if handle.done():  # it arrived between the deadline and the cancelling
                return handle.wait(0)
            self.close()  # nothing may write into the caller's tensors after this call
            raise
        except BaseException:  # Ctrl-C while waiting: the message must not go to an abandoned receive
            handle.cancel()
            raise

    def waiting_to(self, verb: str, tag: str | None) -> str:
        """Return the beginning of a timeout's message."""
        what = f"message {tag!r}" if tag else "a message"
        return f"{self.name} waited for {self.peer} to {verb} {what}"

    def closed_error(self, reason: str) -> ChannelClosedError:
        """Return a new error each time: one instance raised by several threads would collect their tracebacks."""
        return ChannelClosedError(f"the channel of {self.name} to {self.peer} is closed: {reason}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def as_tuple(tensors: Tensors) -> tuple[Tensor, ...]:
    """Return one tensor or several as a tuple."""
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
