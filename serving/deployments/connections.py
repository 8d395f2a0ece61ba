"""Connections of the HTTP server: uvicorn's, which refuse at once what is not worth beginning with.

A refusal by the application takes a task, a scope, an event and a way through every layer; here it takes the parser and
one write. A client that closes its connection is noticed without a task that waits for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from orchestray.serving.http.call import ARRIVED_KEY, CONNECTION_KEY
from orchestray.serving.http.shedding import Refusal, Shedding


class GuardedConnection(HttpToolsProtocol):
    """One connection.

    Args:
        shedding: says what is refused.
        more: what uvicorn gives each of its connections.
    """

    def __init__(self, shedding: Shedding, **more: Any) -> None:
        super().__init__(**more)
        self._shedding = shedding
        self._refusal: Refusal | None = None
        self._on_end: Callable[[], None] | None = None

    # -- `Connection`, for who answers ---------------------------------------------------------------------------------

    def watch(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        if self.transport.is_closing():
            self.loop.call_soon(self._end)
        else:
            self.flow.resume_reading()  # a connection that is not read is not seen to end

    def unwatch(self) -> None:
        self._on_end = None

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end()

    # -- the parser's side ---------------------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        before = cast("RequestResponseCycle | None", self.cycle)
        is_next = before is None or before.response_complete
        if is_next and not self.expect_100_continue and self.parser.get_method() == b"POST":
            self._refusal = self._shedding.refusal(self.loop, self.url, self.headers)
            if self._refusal is not None:
                return
            scope = cast("dict[str, Any]", self.scope)
            scope[ARRIVED_KEY] = self.loop.time() - self._shedding.waited_s
            scope[CONNECTION_KEY] = self
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._refusal is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        refusal, self._refusal = self._refusal, None
        if refusal is None:
            super().on_message_complete()
            return
        keep = self.parser.should_keep_alive() and self.parser.get_http_version() != "1.0"
        self.transport.write(refusal.to_bytes(keep=keep))
        if not keep:
            self.transport.close()
        self.on_response_complete()


def guarded_by(shedding: Shedding) -> type[GuardedConnection]:
    """The class of connections that uvicorn makes."""

    class Guarded(GuardedConnection):
        def __init__(self, **more: Any) -> None:
            super().__init__(shedding, **more)

    return Guarded
