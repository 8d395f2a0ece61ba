"""A pool of connections, as many as there are pending requests, up to a limit."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Sequence

from orchestray.loadtest.connection import LOST, TIMED_OUT, Connection, Request
from orchestray.loadtest.tally import Outcome


class Pool:
    """Connections to one server; the last used one is used next. Must be created in the loop it works on.

    Args:
        host: host of the server.
        port: port of the server.
        payloads: complete requests, as sent; used in turns.
        clock: clock on which requests are due.
        timeout_s: a request that is not answered within this time after it was due has failed; its connection is
            closed.
        max_connections: requests beyond this limit wait for a connection (the wait counts as latency).
        tls: TLS context for https.
    """

    def __init__(
        self,
        host: str,
        port: int,
        payloads: Sequence[bytes],
        *,
        clock: Callable[[], float],
        timeout_s: float,
        max_connections: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._host, self._port, self._tls = host, port, tls
        self._payloads = payloads
        self._clock = clock
        self._timeout_s = timeout_s
        self._max_connections = max_connections
        self._loop = asyncio.get_running_loop()
        self._connections: set[Connection] = set()
        self._idle: list[Connection] = []
        self._waiting: deque[Request] = deque()
        self._opening: set[asyncio.Task[None]] = set()
        self._num_sent = 0
        self.num_retried = 0
        """Number of requests sent again because the server had closed an idle connection as they were sent."""

    def send(self, due_s: float, answered: Callable[[Outcome], None]) -> None:
        """Send the next payload; `answered` is called with the status or the error."""
        request = Request(self._payloads[self._num_sent % len(self._payloads)], answered)
        self._num_sent += 1
        left_s = due_s + self._timeout_s - self._clock()
        request.timer = self._loop.call_later(max(0.0, left_s), self._time_out, request)
        self._start(request)

    def _start(self, request: Request) -> None:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                connection.start(request)
                return
        if len(self._connections) + len(self._opening) < self._max_connections:
            task = self._loop.create_task(self._open(request))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        else:
            self._waiting.append(request)

    async def _open(self, request: Request) -> None:
        """Open a connection for a request."""
        try:
            _, connection = await self._loop.create_connection(
                lambda: Connection(self._freed, self._lost),
                self._host,
                self._port,
                ssl=self._tls,
                server_hostname=self._host if self._tls else None,
            )
        except OSError as error:
            request.end(name_of(error))
            # Otherwise waiting requests would wait for a connection that may never come.
            self._loop.call_soon(self._next)
            return
        self._connections.add(connection)
        if request.done:
            self._freed(connection, True)
        elif connection.open:
            connection.start(request)
        else:
            self._lost(connection, request)

    def _freed(self, connection: Connection, keep: bool) -> None:
        if not keep:
            self._connections.discard(connection)
            self._next()
            return
        while self._waiting:
            request = self._waiting.popleft()
            if not request.done:
                connection.start(request)
                return
        self._idle.append(connection)

    def _next(self) -> None:
        """Start a waiting request, as there is room for one more connection."""
        while self._waiting:
            request = self._waiting.popleft()
            if not request.done:
                self._start(request)
                return

    def _lost(self, connection: Connection, request: Request | None) -> None:
        self._connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if request is not None and not request.done:
            if connection.num_answered and not connection.heard and not request.retried:
                # The server closed an idle connection while this was in transit, as it may: every client retries then.
                request.retried = True
                self.num_retried += 1
                self._start(request)
            else:
                request.end(LOST)
        self._next()

    def _time_out(self, request: Request) -> None:
        connection = request.connection
        request.end(TIMED_OUT)
        if connection is not None:
            connection.abort()

    async def close(self) -> None:
        """Close every connection; pending requests are dropped."""
        for task in list(self._opening):
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        for connection in list(self._connections):
            connection.abort()
        self._idle.clear()


def name_of(error: OSError) -> str:
    """Return a short name of a connection error, the same for every error of a kind."""
    if isinstance(error, ssl.SSLError):
        return "TLS failed"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, TimeoutError):
        return "connecting timed out"
    return "no connection"
