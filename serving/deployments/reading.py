"""Connections that refuse what cannot be read: bytes that are no HTTP, and heads without an end.

An answer that no application gives is JSON all the same, is counted, and has a line in the access log. The parser
keeps a head until it is whole, before any token is looked at: so its size has a limit, as in every other server.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from orchestray.serving.http.call import SCOPE_KEY, Call, new_id
from orchestray.serving.http.refusals import Refusals

MOST_HEAD_BYTES = 65_536
_BETWEEN_BYTES = len(b": \r\n")
"""In a head, beside each name and value."""
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


class _HeadTooLarge(Exception):  # noqa: N818 - the parser takes it for its own end
    """A head is whole, and too large."""


class ReadingConnection(HttpToolsProtocol):
    """Knows which request is being read, and ends with an answer where that cannot be done.

    Args:
        refusals: are told of each such answer; None: nobody is.
        more: what uvicorn gives each of its connections.
    """

    def __init__(self, *, refusals: Refusals | None = None, **more: Any) -> None:
        super().__init__(**more)
        self._refusals = refusals
        self._is_within = self._has_headers = False
        """Of a request: its first byte has come, and not its last; its headers have come."""
        self._begun_s: float | None = None
        """Since when a request is waited for, or read; None: it is whole."""
        self._own_cycle: RequestResponseCycle | None = None
        """Who answers the request that is read; None: nobody was asked to."""
        self._num_chunk_bytes = self._num_head_bytes = 0
        """Of what came last; of what came in a row and is part of no body: of a head, or of what follows a body."""
        self._num_restarts = 0
        """How often that row began anew in what came last."""
        self._owed: tuple[int, str] | None = None
        """The status and text to end with: nothing more is read."""

    def data_received(self, data: bytes) -> None:
        if self._has_given_up:
            return
        num_expected = 0 if self._is_within else 1
        self._num_restarts, self._num_chunk_bytes = 0, len(data)
        super().data_received(data)
        if self._is_within and not self._has_given_up:
            if self._num_restarts == num_expected:  # else the row began somewhere in this: what comes next counts
                self._num_head_bytes += len(data)
            if self._num_head_bytes > MOST_HEAD_BYTES:
                self.end_with(431, _HEAD_TOO_LARGE)

    def send_400_response(self, msg: str) -> None:
        """The parser cannot go on: uvicorn would say so as plain text, and tell nobody."""
        if self._num_head_bytes > MOST_HEAD_BYTES:
            self.end_with(431, _HEAD_TOO_LARGE)
        else:
            self.end_with(400, _NO_HTTP)

    # -- what is read --------------------------------------------------------------------------------------------------

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
        """A request came that the parser is not given."""
        self._begun_s = None

    def _restart(self) -> None:
        self._num_head_bytes = 0
        self._num_restarts += 1

    # -- the answer ----------------------------------------------------------------------------------------------------

    def end_with(self, status: int, text: str) -> None:
        """Answer what is being read with this, after what came before it, and close the connection."""
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
            self.loop.call_soon(self._give_up)  # by then it has begun with it: it has an id, or an answer

    def _give_up(self) -> None:
        if self.transport.is_closing():
            return
        if self._own_cycle is None:
            self._tell(None)
        elif not self._own_cycle.response_started:
            self._own_cycle.disconnected = True  # it sends nothing more
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
            call.gone_status, call.num_body_bytes = status, len(body)  # who has begun with it notes it, at its end
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
        """Whether a request that came before the one that is read is still being answered."""
        return bool(self.pipeline) or (
            self._own_cycle is None and self._cycle is not None and not self._cycle.response_complete
        )

    @property
    def _cycle(self) -> RequestResponseCycle | None:
        return cast("RequestResponseCycle | None", self.cycle)
