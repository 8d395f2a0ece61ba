"""A client of HTTP/1.1 that costs little per request, so that one core can offer a server more than it can answer.

A request takes a seventh of the CPU that it takes with aiohttp's client: about 10 us against 70.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import cast

import httptools

from orchestray.loadtest.plan import Target
from orchestray.loadtest.tally import Outcome

LOST, NOT_HTTP, TIMED_OUT = "connection lost", "not HTTP", "timed out"
_SIZED = (b"content-length", b"transfer-encoding")
_WHY = {ssl.SSLError: "TLS failed", ConnectionRefusedError: "connection refused", TimeoutError: "connecting timed out"}


class Client:
    """A sender of one target's requests over as many connections as there are pending requests, up to a limit.

    The connection that was used last is used next. Must be created in the loop it works on.

    Args:
        target: server, and content of the requests; its bodies are sent in turns.
        timeout_s: seconds after which a request that was due has failed; its connection is closed.
        max_connections: requests beyond this limit wait for a connection (the wait counts as latency).
    """

    def __init__(self, target: Target, *, timeout_s: float, max_connections: int) -> None:
        self._address = target.host, target.port
        self._payloads = itertools.cycle(target.requests())
        self._tls = target.context()
        self._timeout_s = timeout_s
        self._max_connections = max_connections
        self._loop = asyncio.get_running_loop()
        self._connections: dict[_Connection, asyncio.Task[None]] = {}
        """Connections, and the tasks that open them."""
        self._idle: list[_Connection] = []
        self._waiting: deque[_Request] = deque()
        self.num_retried = 0
        """Number of requests sent again because the server had closed an idle connection as they were sent."""

    def send(self, due_s: float, answered: Callable[[Outcome], None]) -> None:
        """Send the next request, due at `due_s` (on `time.monotonic`); `answered` is called once, with its outcome."""
        request = _Request(next(self._payloads), answered)
        left_s = max(0.0, due_s + self._timeout_s - time.monotonic())
        request.timer = self._loop.call_later(left_s, request.time_out)
        self.start(request)

    def start(self, request: _Request) -> None:
        """Send a request over an idle connection or a new one, or let it wait."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                connection.start(request)
                return
        if len(self._connections) >= self._max_connections:
            self._waiting.append(request)
            return
        connection = _Connection(self, request)
        self._connections[connection] = self._loop.create_task(self._open(connection, request))

    async def _open(self, connection: _Connection, request: _Request) -> None:
        try:
            await self._loop.create_connection(lambda: connection, *self._address, ssl=self._tls)
        except (OSError, UnicodeError) as error:  # UnicodeError: not a host's name
            self.lost(connection)
            request.end(next((name for kind, name in _WHY.items() if isinstance(error, kind)), "no connection"))

    def next(self, connection: _Connection | None) -> None:
        """Start the next request that waits, over this connection; None: there is room for a new one."""
        while self._waiting:
            request = self._waiting.popleft()
            if not request.is_done:
                (self if connection is None else connection).start(request)
                return
        if connection is not None:
            self._idle.append(connection)

    def lost(self, connection: _Connection) -> None:
        """Forget a connection."""
        self._connections.pop(connection, None)
        self.next(None)

    async def close(self) -> None:
        """Close every connection; pending requests are dropped."""
        self._waiting.clear()
        for connection, opening in self._connections.items():
            if not opening.cancel():  # it is open
                connection.abort()
        await asyncio.gather(*self._connections.values(), return_exceptions=True)


class _Request:
    """A pending request."""

    __slots__ = ("_answered", "connection", "is_done", "is_retried", "payload", "timer")
    timer: asyncio.TimerHandle

    def __init__(self, payload: bytes, answered: Callable[[Outcome], None]) -> None:
        self.payload = payload
        self._answered = answered
        self.connection: _Connection | None = None
        self.is_retried = self.is_done = False

    def end(self, outcome: Outcome) -> None:
        """Report the outcome; only the first call counts."""
        if not self.is_done:
            self.is_done = True
            self.timer.cancel()
            self._answered(outcome)

    def time_out(self) -> None:
        if self.connection is not None:
            self.connection.abort()
        self.end(TIMED_OUT)


class _Connection(asyncio.Protocol):
    """A connection, which has at most one pending request; it is made for a first one."""

    transport: asyncio.Transport

    def __init__(self, client: Client, first: _Request) -> None:
        self._client = client
        self._first = first
        self._parser = httptools.HttpResponseParser(self)
        self._request: _Request | None = None
        self._has_answered = self._is_heard = self._is_sized = self._lasts_until_end = False

    def start(self, request: _Request) -> None:
        self._request, request.connection = request, self
        self._is_heard = False
        self.transport.write(request.payload)

    def abort(self) -> None:
        """Close at once; a pending request is dropped."""
        self._request = None
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        if self._first.is_done:
            self._client.next(self)
        else:
            self.start(self._first)

    def data_received(self, data: bytes) -> None:
        self._is_heard = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            request = self._request
            self.abort()
            if request is not None:
                request.end(NOT_HTTP)

    def connection_lost(self, exc: Exception | None) -> None:
        request, self._request = self._request, None
        self._client.lost(self)
        if request is None:
            return
        if self._lasts_until_end and exc is None:
            request.end(self._parser.get_status_code())
        elif self._has_answered and not self._is_heard and not request.is_retried:
            # The server closed an idle connection while this was in transit, as it may: every client retries then.
            request.is_retried = True
            self._client.num_retried += 1
            self._client.start(request)
        else:
            request.end(LOST)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in _SIZED:
            self._is_sized = True

    def on_headers_complete(self) -> None:
        self._lasts_until_end = not self._is_sized

    def on_message_complete(self) -> None:
        self._is_sized = self._lasts_until_end = False
        status, request = self._parser.get_status_code(), self._request
        if status < 200 or request is None:
            return
        self._request, self._has_answered = None, True
        # First the connection is given back: `end` may send another request over it.
        if self._parser.should_keep_alive():
            self._client.next(self)
        else:
            self.transport.abort()
        request.end(status)
