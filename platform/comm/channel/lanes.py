"""A channel over a blocking transport, with one thread that reads, and one that writes what cannot be written at once.

The reading thread always waits for the next header. So an end that only computes also notices the death of its peer,
and small messages are here before they are requested. A timeout never touches the transport: it only stops waiting for
the thread.
"""

from __future__ import annotations

import atexit
import threading
from abc import abstractmethod
from collections import deque
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from orchestray.platform.comm.channel.base import (
    CLOSED_HERE,
    Channel,
    ChannelMismatchError,
    Handle,
    Message,
    Meta,
    Request,
    Tensors,
    as_tuple,
)
from orchestray.platform.comm.channel.wire import Landing, Packed, pack

_JOIN_S = 10.0
SENT = object()
"""Mark of a message that has already left."""


class TransportLost(Exception):  # noqa: N818 - turned into ChannelClosedError, never seen outside
    """Raised when the transport ended; the text gives the cause."""


class LaneChannel(Channel):
    """The common part of the gloo and shared memory channels.

    A subclass blocks in four methods. Each of them, and `_begin_write`, raises TransportLost when the transport ends.
    """

    def __init__(self, name: str, peer: str, timeout_s: float) -> None:
        super().__init__(name, peer, timeout_s)
        self._lock = threading.RLock()
        # Two conditions on one lock: a message to receive does not wake the writing thread, nor the other way round.
        self._to_write, self._to_read = threading.Condition(self._lock), threading.Condition(self._lock)
        self._closing = False
        self._send_end: str | None = None  # reason why nothing more can be sent
        self._recv_end: str | None = None  # reason why nothing more arrives
        self._outbox: deque[tuple[Packed, Any, Future[None]]] = deque()
        self._is_writing = False  # True while the writing thread has a message in hand
        self._requests: deque[tuple[Request, Future[Message]]] = deque()
        self._threads: list[threading.Thread] = []

    def _begin_write(self, packed: Packed, *, is_next: bool) -> Any:
        """Begin to write a message in the sender's thread, in the order of messages, if that need not block.

        This saves the detour through the writing thread. The result is passed to `_write`, unless it is SENT: then the
        message has left. `is_next` is True if no earlier message is still to be written.
        """
        return None

    @abstractmethod
    def _write(self, packed: Packed, begun: Any) -> None:
        """Write the blob, then the large tensors; return when they have left."""

    @abstractmethod
    def _read_blob(self) -> bytearray:
        """Block until the next blob has arrived, and return it."""

    @abstractmethod
    def _read_into(self, flat: Tensor) -> None:
        """Fill a flat uint8 tensor with the next large one."""

    @abstractmethod
    def _hang_up(self) -> None:
        """End the transport so that blocked threads return, here and at the peer; called once."""

    def _release(self) -> None:
        """Free the resources of the threads, which have ended."""

    def _start_lanes(self) -> None:
        """Start the threads; a subclass calls this at the end of its constructor."""
        for lane in (self._read_lane, self._write_lane):
            thread = threading.Thread(target=lane, name=f"channel {self.name}-{self.peer}", daemon=True)
            self._threads.append(thread)
            thread.start()
        # A thread that returns from the transport while the interpreter shuts down would abort the process.
        atexit.register(self.close)

    def isend(self, tensors: Tensors, *, tag: str = "", meta: Meta = None) -> Handle[None]:
        return Handle(self._begin(pack(as_tuple(tensors), tag, meta)), self.waiting_to("take", tag), self.timeout_s)

    def _begin(self, packed: Packed) -> Future[None]:
        """Send it, at once or by the writing thread."""
        future: Future[None] = Future()
        with self._lock:
            if self._send_end is not None:
                raise self.closed_error(self._send_end)
            try:
                begun = self._begin_write(packed, is_next=not self._outbox and not self._is_writing)
            except TransportLost as lost:
                raise self.closed_error(str(lost)) from None
            except BaseException:  # an interrupt: it is unknown how much has left
                self._send_end = "a send was interrupted"
                raise
            if begun is not None:
                future.set_running_or_notify_cancel()  # it cannot be cancelled any more
                self._count(packed)  # now: the peer may have it, and both may close, before the thread comes to it
            if begun is SENT:
                future.set_result(None)
            else:
                self._outbox.append((packed, begun, future))
                self._to_write.notify_all()
        return future

    def irecv(self, *, into: Tensors | None = None, tag: str | None = None) -> Handle[Message]:
        request = Request.of(into, tag)
        future: Future[Message] = Future()
        with self._lock:
            if self._recv_end is not None:
                raise self.closed_error(self._recv_end)
            self._requests.append((request, future))
            self._to_read.notify_all()
        return Handle(future, self.waiting_to("send", tag), self.timeout_s)

    def close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._send_end = self._send_end or CLOSED_HERE
            self._to_write.notify_all()
            self._to_read.notify_all()
        atexit.unregister(self.close)
        self._hang_up()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)
        if not any(thread.is_alive() for thread in self._threads):
            self._release()

    def _write_lane(self) -> None:
        while (job := self._next_send()) is not None:
            packed, begun, future = job
            try:
                self._write(packed, begun)
            except Exception as error:  # noqa: BLE001 - pending operations report whatever ended the thread
                self._end(_why(error), future, receives=False)
                return
            with self._lock:
                if begun is None:
                    self._count(packed)
                self._is_writing = False
            future.set_result(None)
        self._end(CLOSED_HERE, None, receives=False)

    def _count(self, packed: Packed) -> None:
        self.bytes_sent += packed.payload_bytes
        self.overhead_bytes_sent += packed.overhead_bytes
        self.messages_sent += packed.file is None

    def _next_send(self) -> tuple[Packed, Any, Future[None]] | None:
        with self._lock:
            while True:
                self._to_write.wait_for(lambda: self._outbox or self._send_end is not None)
                if self._send_end is not None:
                    return None
                packed, begun, future = self._outbox.popleft()
                if begun is not None or future.set_running_or_notify_cancel():
                    self._is_writing = True
                    return packed, begun, future

    def _read_lane(self) -> None:
        claimed: Future[Message] | None = None
        try:
            while True:
                blob = self._read_blob()
                request, claimed = self._next_request()
                landing = Landing(blob, request, self.name)
                for flat in landing.large:
                    self._read_into(flat)
                self._hand_over(landing, claimed)
                claimed = None
        except Exception as error:  # noqa: BLE001 - as above
            self._end(_why(error), claimed, receives=True)

    def _next_request(self) -> tuple[Request, Future[Message]]:
        with self._lock:
            while True:
                self._to_read.wait_for(lambda: self._requests or self._closing)
                if self._closing:
                    raise TransportLost(CLOSED_HERE)
                request, future = self._requests.popleft()
                if future.set_running_or_notify_cancel():  # else its `recv` timed out; the message is for the next one
                    return request, future

    def _hand_over(self, landing: Landing, future: Future[Message]) -> None:
        self.bytes_received += landing.payload_bytes
        self.messages_received += 1
        try:
            message = landing.finish()
        except ChannelMismatchError as error:
            future.set_exception(error)
        else:
            future.set_result(message)

    def _end(self, reason: str, claimed: Future[Any] | None, *, receives: bool) -> None:
        """Stop sending, and with `receives` also receiving; pending operations raise an error."""
        waiting: list[Future[Any]] = [claimed] if claimed else []
        with self._lock:
            reason = CLOSED_HERE if self._closing else reason
            self._send_end = self._send_end or reason
            unsent = [future for _, _, future in self._outbox]
            self._outbox.clear()
            unread: list[Future[Message]] = []
            if receives:
                self._recv_end = self._recv_end or reason
                unread = [future for _, future in self._requests]
                self._requests.clear()
            self._to_write.notify_all()
            self._to_read.notify_all()
        waiting += [*unsent, *unread]
        for future in waiting:
            if not future.running() and not future.set_running_or_notify_cancel():
                continue
            future.set_exception(self.closed_error(reason))


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, TransportLost) else f"{type(error).__name__}: {error}"
