"""Connections of the HTTP server: uvicorn's, with an immediate refusal of requests that are not worth starting.

A refusal by the application takes a task, a scope, an event and a path through every layer. Here it takes one look at
the bytes and one write, or the parser if they are not a whole request. A client that closes its connection is noticed
without a task that waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from orchestray.serving.http.overload.heads import Heads, wish_of
from orchestray.serving.http.overload.shedding import LoadShedder, Refusal
from orchestray.serving.http.request_context import ARRIVED_KEY, CONNECTION_KEY


class GuardedConnection(HttpToolsProtocol):
    """A connection that refuses requests under overload.

    Args:
        shedding: decides which requests are refused.
        heads: reader of request heads.
        more: arguments of uvicorn's connections.
    """

    def __init__(self, shedding: LoadShedder, heads: Heads, **more: Any) -> None:
        super().__init__(**more)
        self._shedding = shedding
        self._heads = heads
        self._is_between = True
        """True if no request has been read in part."""
        self._is_taken_on = False
        """True if `shedding` has already accepted the request that is read now."""
        self._refused_s = 0.0
        self._refusal: Refusal | None = None
        self._on_end: Callable[[], None] | None = None

    # -- the `Connection` protocol -------------------------------------------------------------------------------------

    def watch(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        if self.transport.is_closing():
            self.loop.call_soon(self._end)
        else:
            self.flow.resume_reading()  # the end of a connection is noticed only while it is read

    def unwatch(self) -> None:
        self._on_end = None

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end()

    # -- requests that arrive in one piece -----------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        may_refuse = self._is_between and self._is_free and not self.flow.write_paused
        if may_refuse and (head := self._heads.read(data)) is not None:
            answer = self._shedding.again(head.wish, self._host)
            if answer is None and (refusal := self._shedding.refusal(self.loop, head.wish, self._host)) is not None:
                answer = refusal.to_bytes(keep=True)
            if answer is not None:
                self._refuse(answer)
                return
            self._is_taken_on = True
        super().data_received(data)

    @property
    def _host(self) -> str | None:
        return self.client[0] if self.client else None

    @property
    def _is_free(self) -> bool:
        """True if no request is being answered here."""
        before = cast("RequestResponseCycle | None", self.cycle)
        return (before is None or before.response_complete) and not self.pipeline

    def _refuse(self, answer: bytes) -> None:
        """Answer a request that was not given to the parser."""
        self.on_whole_request()
        self.transport.write(answer)
        self.server_state.total_requests += 1
        self._refused_s = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._wait_for_more(self.timeout_keep_alive)

    def on_whole_request(self) -> None:
        """Note a request that the parser does not get, for classes that watch how requests come."""

    # -- a client that does not read its answers: no more of its requests are read either ------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_where_answers_pile_up()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.pipeline:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._stop_where_answers_pile_up()

    def _stop_where_answers_pile_up(self) -> None:
        """Stop reading if answers pile up; while one is computed, read on to notice the end of the connection."""
        if self.flow.write_paused and self._is_free:
            self.flow.pause_reading()

    def _wait_for_more(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection unless a request was refused meanwhile: resetting the timer at each would cost more."""
        left_s = self._refused_s + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self._wait_for_more(left_s)
        else:
            super().timeout_keep_alive_handler()

    # -- callbacks of the parser ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._is_between = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        is_taken_on, self._is_taken_on = self._is_taken_on, False
        if is_taken_on or (self._is_free and not self.expect_100_continue and self.parser.get_method() == b"POST"):
            if not is_taken_on:
                wish = wish_of(self.url, self.headers)
                self._refusal = self._shedding.refusal(self.loop, wish, self._host)
            if self._refusal is not None:
                return
            scope = cast("dict[str, Any]", self.scope)
            scope[ARRIVED_KEY] = self._shedding.arrived_s(self.loop.time())
            scope[CONNECTION_KEY] = self
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._refusal is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_between = True
        refusal, self._refusal = self._refusal, None
        if refusal is None:
            super().on_message_complete()
            return
        keep = self.parser.should_keep_alive() and self.parser.get_http_version() != "1.0"
        self.transport.write(refusal.to_bytes(keep=keep))
        if not keep:
            self.transport.close()
        self.on_response_complete()


def guarded_by(shedding: LoadShedder) -> type[GuardedConnection]:
    """Return the class of connections for uvicorn to use."""
    heads = Heads()

    class Guarded(GuardedConnection):
        def __init__(self, **more: Any) -> None:
            super().__init__(shedding, heads, **more)

    return Guarded
