"""HTTP/1.1 connections of a load generator: little work per request, one request at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from orchestray.loadtest.tally import Outcome

LOST = "connection lost"
NOT_HTTP = "not HTTP"
TIMED_OUT = "timed out"

_SIZED = (b"content-length", b"transfer-encoding")
_FIRST_FINAL_STATUS = 200


class Request:
    """A pending request."""

    __slots__ = ("answered", "connection", "done", "payload", "retried", "timer")

    def __init__(self, payload: bytes, answered: Callable[[Outcome], None]) -> None:
        self.payload = payload
        self.answered = answered
        self.connection: Connection | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.retried = False
        self.done = False

    def end(self, outcome: Outcome) -> None:
        """Report the outcome; only the first call counts."""
        if self.done:
            return
        self.done = True
        if self.timer is not None:
            self.timer.cancel()
        self.answered(outcome)


class Connection(asyncio.Protocol):
    """A connection that calls `freed(self, keep)` when its request has ended, and `lost(self, request)` if lost."""

    def __init__(
        self, freed: Callable[[Connection, bool], None], lost: Callable[[Connection, Request | None], None]
    ) -> None:
        self._freed = freed
        self._lost = lost
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._request: Request | None = None
        self._sized = False
        self._until_end = False
        self.num_answered = 0
        self.heard = False
        """True if any part of the answer to the current request has come."""

    @property
    def open(self) -> bool:
        """True if it can take a request."""
        return self._transport is not None and not self._transport.is_closing()

    def start(self, request: Request) -> None:
        """Send a request; none may be pending."""
        assert self._transport is not None
        assert self._request is None
        self._request = request
        request.connection = self
        self.heard = False
        self._transport.write(request.payload)

    def abort(self) -> None:
        """Close at once; a pending request is dropped."""
        self._request = None
        if self._transport is not None:
            self._transport.abort()

    # -- called by asyncio ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.heard = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            request = self._request
            self.abort()
            if request is not None:
                request.end(NOT_HTTP)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        request, self._request = self._request, None
        if request is not None and self._until_end and exc is None:
            request.end(self._parser.get_status_code())
            request = None
        self._lost(self, request)

    # -- called by the parser ------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._sized = self._until_end = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in _SIZED:
            self._sized = True

    def on_headers_complete(self) -> None:
        # An answer without a length lasts until the connection is closed.
        self._until_end = not self._sized

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < _FIRST_FINAL_STATUS:
            return
        request, self._request = self._request, None
        if request is None:
            return
        self.num_answered += 1
        keep = self._parser.should_keep_alive()
        if not keep and self._transport is not None:
            self._transport.close()
        # First the connection is given back: `answered` may send another request over it.
        self._freed(self, keep)
        request.end(status)
