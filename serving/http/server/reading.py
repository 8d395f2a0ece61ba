"""Connections that refuse what cannot be read: bytes that are not HTTP, and heads without an end.

An answer that does not come from the application is JSON too, is counted, and has a line in the access log. The parser
buffers a head until it is whole, before any token is checked. So the size of a head is limited, as in other servers.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from orchestray.serving.http.access_log import AccessLog
from orchestray.serving.http.request_context import SCOPE_KEY, Call, new_id

MOST_HEAD_BYTES = 65_536
_BETWEEN_BYTES = len(b": \r\n")
"""Number of bytes in a head besides each name and value."""
_HEAD = (
    b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    b"connection: close\r\nx-request-id: %s\r\n\r\n%s"
)
_NO_HTTP = (
    "What came is no request of HTTP/1.1. Check its headers and how its body is framed, and ask by https:// where the "
    "endpoint has TLS, by http:// where it has none."
)
_HEAD_TOO_LARGE = (
    f"The address and headers of the request have more than {MOST_HEAD_BYTES // 1024} KiB. Send less in them: data "
    "belongs in the body."
)


class _HeadTooLarge(Exception):  # noqa: N818 - the parser takes it for an error of its own
    """The signal that a whole head is too large."""


class ReadingConnection(HttpToolsProtocol):
    """A connection that tracks the request being read, and ends with an answer if it cannot be read.

    Args:
        refusals: recorder of such answers; None: not recorded.
        more: arguments of uvicorn's connections.
    """

    def __init__(self, *, refusals: AccessLog | None = None, **more: Any) -> None:
        super().__init__(**more)
        self._refusals = refusals
        self._is_within = self._has_headers = False
        """True if the headers of the current request have come; `_is_within`: its first byte, but not its last."""
        self._begun_s: float | None = None
        """Time since when a request is awaited or read; None: it is whole."""
        self._own_cycle: RequestResponseCycle | None = None
        """Cycle that answers the request being read; None: none yet."""
        self._num_chunk_bytes = self._num_head_bytes = 0
        """Bytes in a row that are not of a body (of a head, or after a body); `_num_chunk_bytes`: the last ones."""
        self._num_restarts = 0
        """Number of times that the row restarted within the bytes that came last."""
        self._owed: tuple[int, str] | None = None
        """Status and text to end with; nothing more is read."""

    def data_received(self, data: bytes) -> None:
        if self._has_given_up:
            return
        num_expected = 0 if self._is_within else 1
        self._num_restarts, self._num_chunk_bytes = 0, len(data)
        super().data_received(data)
        if self._is_within and not self._has_given_up:
            if self._num_restarts == num_expected:  # else the row restarted within: count what comes next
                self._num_head_bytes += len(data)
            if self._num_head_bytes > MOST_HEAD_BYTES:
                self.end_with(431, _HEAD_TOO_LARGE)

    def send_400_response(self, msg: str) -> None:
        """End with an error in our form: uvicorn would send plain text, and record nothing."""
        if self._num_head_bytes > MOST_HEAD_BYTES:
            self.end_with(431, _HEAD_TOO_LARGE)
        else:
            self.end_with(400, _NO_HTTP)

    # -- reading -------------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._begun_s, self._own_cycle = self.loop.time(), None
        self._is_within, self._has_headers = True, False
        self._restart()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._num_head_bytes + self._num_chunk_bytes > MOST_HEAD_BYTES:
            sizes = (len(name) + len(value) + _BETWEEN_BYTES for name, value in self.headers)
            self._num_head_bytes = len(self.url) + sum(sizes)
            if self._num_head_bytes > MOST_HEAD_BYTES:
                raise _HeadTooLarge
        self._has_headers = True
        before = self._cycle
        super().on_headers_complete()
        self._own_cycle = self._cycle if self._cycle is not before else None
        self._restart()

    def on_body(self, body: bytes) -> None:
        self._restart()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._begun_s, self._own_cycle = None, None
        self._is_within = self._has_headers = False
        super().on_message_complete()

    def on_whole_request(self) -> None:
        """Note a request that the parser does not get."""
        self._begun_s = None

    def _restart(self) -> None:
        self._num_head_bytes = 0
        self._num_restarts += 1

    # -- the answer ----------------------------------------------------------------------------------------------------

    def end_with(self, status: int, text: str) -> None:
        """Answer the request being read with this, after those before it, and close the connection."""
        self._owed = (status, text)
        self._pay()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._pay()

    def _pay(self) -> None:
        if self._owed is None or self._is_answering_before:
            return
        if self._own_cycle is None:
            self._give_up()
        else:
            self.loop.call_soon(self._give_up)  # by then the application has begun with it: it has an id, or an answer

    def _give_up(self) -> None:
        if self.transport.is_closing():
            return
        if self._own_cycle is None:
            self._tell(None)
        elif not self._own_cycle.response_started:
            self._own_cycle.disconnected = True  # so that the application sends nothing more
            self._tell(cast("Call | None", self._own_cycle.scope.get(SCOPE_KEY)))
        self.transport.close()

    def _tell(self, call: Call | None) -> None:
        assert self._owed is not None
        status, text = self._owed
        request_id = new_id() if call is None else call.request_id
        body = json.dumps({"error": text, "request_id": request_id}).encode() + b"\n"
        phrase = HTTPStatus(status).phrase.encode()
        self.transport.write(_HEAD % (status, phrase, len(body), request_id.encode(), body))
        if call is not None:
            call.gone_status, call.num_body_bytes = status, len(body)  # the application records it at its end
        elif self._refusals is not None:
            scope = cast("dict[str, Any]", self.scope) if self._has_headers else {}
            self._refusals.note(
                status,
                request_id,
                0.0 if self._begun_s is None else self.loop.time() - self._begun_s,
                method=scope.get("method", ""),
                path=self.url.partition(b"?")[0] if self._has_headers else b"",
                client=self.client[0] if self.client else None,
                num_bytes=len(body),
            )

    @property
    def _has_given_up(self) -> bool:
        return self._owed is not None

    @property
    def _is_answering_before(self) -> bool:
        """True if an earlier request than the one being read is still being answered."""
        return bool(self.pipeline) or (
            self._own_cycle is None and self._cycle is not None and not self._cycle.response_complete
        )

    @property
    def _cycle(self) -> RequestResponseCycle | None:
        return cast("RequestResponseCycle | None", self.cycle)
