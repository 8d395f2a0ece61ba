"""A channel between two threads of one process, for unit tests that run replicas as threads and script failures.

Sends are buffered without limit and never wait. Tensors are copied when sent and copied out when received, so no memory
is shared, as over a network.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import torch

from orchestray.platform.comm.channel.base import (
    CLOSED_HERE,
    DEFAULT_TIMEOUT_S,
    GONE,
    Channel,
    ChannelMismatchError,
    Handle,
    Message,
    Meta,
    Request,
    Tensors,
    as_tuple,
)
from orchestray.platform.comm.channel.wire import check_dense, content_of, deliver


class Inbox:
    """Arrived messages and waiting receives, matched in order. `owner` is the end that reads it."""

    def __init__(self, owner: Channel, new_future: Callable[[], Future[Message]] = Future) -> None:
        self._owner = owner
        self._new_future = new_future
        self._lock = threading.Lock()
        self._messages: deque[Message] = deque()
        self._requests: deque[tuple[Request, Future[Message]]] = deque()
        self._end: str | None = None

    def put(self, message: Message) -> None:
        """Pass the message to the first waiting receive, or keep it for the next one."""
        with self._lock:
            if self._end is None:
                self._messages.append(message)
        self._match()

    def ask(self, request: Request) -> Future[Message]:
        """Return a future of the next message; raise ChannelClosedError if there will never be one."""
        future = self._new_future()
        with self._lock:
            if self._end is not None and not self._messages:
                raise self._owner.closed_error(self._end)
            self._requests.append((request, future))
        self._match()
        return future

    def end(self, reason: str, *, keep_messages: bool) -> None:
        """End the inbox; with `keep_messages`, messages that have arrived can still be received."""
        with self._lock:
            self._end = self._end or reason
            if not keep_messages:
                self._messages.clear()
            waiting = [future for _, future in self._requests]
            self._requests.clear()
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(self._owner.closed_error(reason))

    def _match(self) -> None:
        while self._messages and self._requests:
            with self._lock:
                if not (self._messages and self._requests):
                    return  # another thread was faster
                request, future = self._requests.popleft()
                if not future.set_running_or_notify_cancel():
                    continue
                message = self._messages.popleft()
                self._owner.bytes_received += num_bytes(message)
                self._owner.messages_received += 1
            try:
                answer = deliver(message, request, self._owner.name)
            except ChannelMismatchError as error:
                future.set_exception(error)
            else:
                future.set_result(answer)


class FaultScript:
    """A script of failures for the messages one end sends, counted from 0. Methods can be chained."""

    def __init__(self) -> None:
        self._drop: set[int] = set()
        self._delay: set[int] = set()
        self._fail_at: int | None = None

    def drop(self, *messages: int) -> FaultScript:
        """Lose these messages: they are sent and never arrive."""
        self._drop.update(messages)
        return self

    def delay(self, *messages: int) -> FaultScript:
        """Hold each of these messages, and all behind it, until the test calls `release`."""
        self._delay.update(messages)
        return self

    def fail_at(self, message: int) -> FaultScript:
        """Let the sender die instead of sending this message: its call raises, and the channel is closed."""
        self._fail_at = message
        return self

    def fails(self, message: int) -> bool:
        """Return True if the sender dies at this message."""
        return self._fail_at == message

    def drops(self, message: int) -> bool:
        """Return True if this message is lost."""
        return message in self._drop

    def delays(self, message: int) -> bool:
        """Return True if this message is held."""
        return message in self._delay


class ThreadChannel(Channel):
    """One end of a channel between threads, made by thread_pair."""

    def __init__(self, name: str, peer: str, timeout_s: float, faults: FaultScript | None) -> None:
        super().__init__(name, peer, timeout_s)
        self._faults = faults or FaultScript()
        self._inbox = Inbox(self)
        self._other: ThreadChannel = self
        self._lock = threading.RLock()
        self._held: deque[tuple[int, Message]] = deque()
        self._released = 0
        self._end: str | None = None

    def isend(self, tensors: Tensors, *, tag: str = "", meta: Meta = None) -> Handle[None]:
        message = copied(tensors, tag, meta)
        with self._lock:
            number = self.messages_sent
            if self._end is None and self._faults.fails(number):
                self._end_both("its fault script ended it", GONE)
            if self._end is not None:
                raise self.closed_error(self._end)
            self.bytes_sent += num_bytes(message)
            self.messages_sent += 1
            if not self._faults.drops(number):
                self._held.append((number, message))
                self._pass_on()
        done: Future[None] = Future()
        done.set_result(None)
        return Handle(done, self.waiting_to("take", tag), self.timeout_s)

    def irecv(self, *, into: Tensors | None = None, tag: str | None = None) -> Handle[Message]:
        return Handle(self._inbox.ask(Request.of(into, tag)), self.waiting_to("send", tag), self.timeout_s)

    def release(self) -> None:
        """Let the first delayed message arrive, and those behind it up to the next delayed one."""
        with self._lock:
            self._released += 1
            self._pass_on()

    def close(self) -> None:
        self._end_both(CLOSED_HERE, GONE)

    def _pass_on(self) -> None:
        while self._held:
            number, message = self._held[0]
            if self._faults.delays(number):
                if not self._released:
                    return
                self._released -= 1
            self._held.popleft()
            self._other._inbox.put(message)

    def _end_both(self, here: str, there: str) -> None:
        self._end = self._end or here
        self._inbox.end(here, keep_messages=False)
        self._other._end = self._other._end or there
        self._other._inbox.end(there, keep_messages=True)


def thread_pair(
    left: str = "left",
    right: str = "right",
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    left_faults: FaultScript | None = None,
    right_faults: FaultScript | None = None,
) -> tuple[ThreadChannel, ThreadChannel]:
    """Return the two ends of a channel between threads."""
    a, b = ThreadChannel(left, right, timeout_s, left_faults), ThreadChannel(right, left, timeout_s, right_faults)
    a._other, b._other = b, a
    return a, b


def copied(tensors: Tensors, tag: str, meta: Meta) -> Message:
    """Return the message with its tensors copied, so that the sender may change its own afterwards."""
    given = as_tuple(tensors)
    check_dense(given)
    copies = tuple(t if t.is_meta else t.detach().clone(memory_format=torch.contiguous_format) for t in given)
    return Message(copies, tag, content_of(meta))


def num_bytes(message: Message) -> int:
    """Return the bytes of the message's tensors."""
    return sum([t.nbytes for t in message.tensors])
