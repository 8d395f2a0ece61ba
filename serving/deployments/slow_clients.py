"""Connections that do not wait for ever: a client that sends a request byte by byte would hold one as long as it likes.

As Apache's mod_reqtimeout does: so long for the headers, and as long for a body, and more while that comes fast enough.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from orchestray.serving.http.call import SCOPE_KEY, Call, new_id
from orchestray.serving.http.refusals import Refusals

_LEAST_BYTES_PER_S = 16_384
"""Of a body: one that comes faster has all the time it takes."""
_STATUS = 408
_HEAD = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    b"connection: close\r\nx-request-id: %s\r\n\r\n%s"
)


class ImpatientConnection(HttpToolsProtocol):
    """Ends with a 408 where a request takes too long to come; without a word where none has begun.

    A request that comes in one piece costs nothing for it: a timer is set where one was begun, and is not whole.

    Args:
        read_timeout_s: that a client may take.
        refusals: are told of each 408; None: nobody is.
        more: what uvicorn gives each of its connections.
    """

    def __init__(self, *, read_timeout_s: float, refusals: Refusals | None = None, **more: Any) -> None:
        super().__init__(**more)
        self._refusals = refusals
        self._read_timeout_s = read_timeout_s
        self._begun_s: float | None = None
        """Since when a request is read; None: it is whole."""
        self._has_first_byte = self._has_headers = False
        self._num_body_bytes = 0
        self._own_cycle: RequestResponseCycle | None = None
        """Who answers the request that is read; None: nobody was asked to."""
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self._begun_s = self.loop.time()
        self._be_patient(self._read_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._patience is not None:
            self._patience.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._begun_s is not None and self._patience is None and not self.transport.is_closing():
            self._be_patient(self._read_timeout_s)

    def on_message_begin(self) -> None:
        self._begun_s, self._num_body_bytes = self.loop.time(), 0
        self._has_first_byte, self._has_headers, self._own_cycle = True, False, None
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._has_headers = True
        before = self._cycle
        super().on_headers_complete()
        self._own_cycle = self._cycle if self._cycle is not before else None

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._begun_s = None
        super().on_message_complete()

    def on_whole_request(self) -> None:
        """A request came that the parser is not given."""
        self._begun_s = None

    def _be_patient(self, seconds: float) -> None:
        self._patience = self.loop.call_later(seconds, self._lose_patience)

    def _lose_patience(self) -> None:
        self._patience = None
        if self._begun_s is None or self.transport.is_closing():
            return
        if self._is_held_up():
            self._begun_s = self.loop.time()
        left_s = self._begun_s + self._read_timeout_s + self._num_body_bytes / _LEAST_BYTES_PER_S - self.loop.time()
        if left_s > 0:
            self._be_patient(left_s)
            return
        if self._has_first_byte and not (self._own_cycle is not None and self._own_cycle.response_started):
            self._answer_too_slow()
        self.transport.close()

    def _answer_too_slow(self) -> None:
        call = None if self._own_cycle is None else cast("Call | None", self._own_cycle.scope.get(SCOPE_KEY))
        request_id = new_id() if call is None else call.request_id
        body = _too_slow(self._read_timeout_s, request_id)
        self.transport.write(_HEAD % (len(body), request_id.encode(), body))
        if call is not None:
            call.gone_status = _STATUS  # who has begun with it notes it, when the connection ends
        elif self._refusals is not None:
            scope: dict[str, Any] = cast("dict[str, Any]", self.scope)
            self._refusals.note(
                _STATUS,
                request_id,
                self.loop.time() - (self._begun_s or 0.0),
                method=scope.get("method", ""),
                path=self.url.partition(b"?")[0] if self._has_headers else b"",
                client=self.client[0] if self.client else None,
                num_bytes=len(body),
            )

    def _is_held_up(self) -> bool:
        """Whether it is not the client's doing: it is not read from, or an earlier request is still being answered."""
        is_answering = bool(self.pipeline) or (
            not self._has_headers and self._cycle is not None and not self._cycle.response_complete
        )
        return self.flow.read_paused or is_answering

    @property
    def _cycle(self) -> RequestResponseCycle | None:
        return cast("RequestResponseCycle | None", self.cycle)


def impatient(
    base: type[HttpToolsProtocol], read_timeout_s: float, refusals: Refusals | None = None
) -> type[HttpToolsProtocol]:
    """The class of connections that uvicorn makes: those of `base`, which wait so long for a request."""

    class Impatient(ImpatientConnection, base):  # type: ignore[misc, valid-type]
        def __init__(self, **more: Any) -> None:
            super().__init__(read_timeout_s=read_timeout_s, refusals=refusals, **more)

    return Impatient


def _too_slow(read_timeout_s: float, request_id: str) -> bytes:
    text = f"The request did not come within {read_timeout_s:g} s. Send it faster, or raise http.read_timeout_s."
    return json.dumps({"error": text, "request_id": request_id}).encode() + b"\n"
