"""Connections of the HTTP server: uvicorn's, which refuse what is not worth starting, or cannot be read in time.

- Requests under overload. A refusal by the application takes a task, a scope, an event and a path through every layer.
  Here it takes one look at the bytes and one write, or the parser if they are not a whole request.
- Bytes that are not HTTP, and heads without an end. The parser buffers a head until it is whole, before any token is
  checked. So the size of a head is limited, as in other servers.
- Slow clients: one could otherwise hold a connection by sending a request byte by byte. The limits are those of
  Apache's mod_reqtimeout: a time for the headers, the same for a body, and more while the body comes fast enough.

A client that closes its connection is noticed without a task that waits for it. An answer that does not come from the
application is JSON too, is counted, and has a line in the access log.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from orchestray.serving.http.overload.heads import Heads, wish_of
from orchestray.serving.http.overload.shedding import LoadShedder, Refusal
from orchestray.serving.http.request_context import ARRIVED_KEY, CONNECTION_KEY, SCOPE_KEY, Call, new_id

MOST_HEAD_BYTES = 65_536
_BETWEEN_BYTES = len(b": \r\n")
"""Number of bytes in a head besides each name and value."""
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
_GO_ON = b"HTTP/1.1 100 Continue\r\n\r\n"
_CLOSED = 7
"""Linux's number for a socket that is closed, as TCP_INFO has it first."""
_LOOK_EVERY_S = 0.05
_LEAST_BYTES_PER_S = 16_384
"""Rate of a body above which it may take any time."""
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


class GuardedConnection(HttpToolsProtocol):
    """A connection that refuses requests under overload, ends where one cannot be read, and has a time limit for each.

    A request that takes too long to come is a 408; where none has begun, the connection ends silently. One that comes
    in one piece costs nothing extra: a timer is set only for one that is incomplete.

    Args:
        shedding: decides which requests are refused, and records the answers that the application does not give.
        heads: reader of request heads.
        read_timeout_s: seconds that a client may take for a request.
        more: arguments of uvicorn's connections.
    """

    cycle: RequestResponseCycle | None  # type: ignore[assignment]

    def __init__(self, *, shedding: LoadShedder, heads: Heads, read_timeout_s: float, **more: Any) -> None:
        super().__init__(**more)
        self._shedding = shedding
        self._heads = heads
        self._read_timeout_s = read_timeout_s
        self._patience: asyncio.TimerHandle | None = None
        self._is_taken_on = False
        """True if `shedding` has already accepted the request that is read now."""
        self._refused_s = 0.0
        self._refusal: Refusal | None = None
        self._on_end: Callable[[], None] | None = None
        self._has_ended = False
        """True if the client sends nothing more."""
        self._is_within = self._has_headers = False
        """True if the headers of the current request have come; `_is_within`: its first byte, but not its last."""
        self._begun_s: float | None = None
        """Time since when a request is awaited or read; None: it is whole."""
        self._own_cycle: RequestResponseCycle | None = None
        """Cycle that answers the request being read; None: none yet."""
        self._num_body_bytes = 0
        self._num_chunk_bytes = self._num_head_bytes = 0
        """Bytes in a row that are not of a body (of a head, or after a body); `_num_chunk_bytes`: the last ones."""
        self._num_restarts = 0
        """Number of times that the row restarted within the bytes that came last."""
        self._owed: tuple[int, str] | None = None
        """Status and text to end with; nothing more is read."""

    # -- a client that leaves ------------------------------------------------------------------------------------------

    def watch(self, on_end: Callable[[], None]) -> None:
        """Call `on_end` when the client closes it, or soon if it has, unless `unwatch` comes first."""
        self._on_end = on_end
        if self.transport.is_closing():
            self.loop.call_soon(self._end)
        else:
            self.flow.resume_reading()  # the end of a connection is noticed only while it is read

    def unwatch(self) -> None:
        """Stop watching, because the request is answered."""
        self._on_end = None

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self._host = self.client[0] if self.client else None
        self._begun_s = self.loop.time()
        self._be_patient(self._read_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._patience is not None:
            self._patience.cancel()
        super().connection_lost(exc)
        self._end()

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio takes it, as uvicorn's stubs forget
        """Return True if the connection stays open, as its client may have ended its own side alone.

        A client that has left looks the same until something is sent to it, which it answers by a reset.
        """
        cycle = self.cycle
        if cycle is None or cycle.response_complete or self._is_within or self.scheme == "https":
            return False
        if cycle.scope["http_version"] != "1.1":
            return False
        if not self._has_ended:
            self._has_ended = True
            if not cycle.response_started:
                self.transport.write(_GO_ON)
            self._look_for_reset()
        return True

    def _look_for_reset(self) -> None:
        if self.transport.is_closing():
            return
        if self._is_free:
            self.transport.close()
        elif self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSED:
            self.transport.abort()
        else:
            self.loop.call_later(_LOOK_EVERY_S, self._look_for_reset)

    # -- what comes ----------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._owed is not None:
            return
        if not self._is_within and self._is_free and not self.flow.write_paused and self._is_refused(data):
            return
        num_expected = 0 if self._is_within else 1
        if num_expected and (end := data.find(b"\r\n\r\n", 0, MOST_HEAD_BYTES)) >= 0:
            # An offer of HTTP/2, as Java's clients make it: the parser would skip the body and end with the request.
            head = _UPGRADE.sub(b"", data[:end])
            data = data if len(head) == end else head + data[end:]
        self._num_restarts, self._num_chunk_bytes = 0, len(data)
        super().data_received(data)
        if self._begun_s is None or self._owed is not None:
            return
        if self._is_within:
            if self._num_restarts == num_expected:  # else the row restarted within: count what comes next
                self._num_head_bytes += len(data)
            if self._num_head_bytes > MOST_HEAD_BYTES:
                self._end_with(431, _HEAD_TOO_LARGE)
        if self._patience is None and not self.transport.is_closing():
            self._be_patient(self._read_timeout_s)

    def _is_refused(self, data: bytes) -> bool:
        """Return True if these bytes are a whole request that is refused, and has its answer."""
        if (head := self._heads.read(data)) is None:
            return False
        answer = self._shedding.again(head.wish, self._host)
        if answer is None and (refusal := self._shedding.refusal(self.loop, head.wish, self._host)) is not None:
            answer = refusal.to_bytes(keep=True)
        if answer is None:
            self._is_taken_on = True
            return False
        self._begun_s = None
        self.transport.write(answer)
        self.server_state.total_requests += 1
        self._refused_s = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._wait_for_more(self.timeout_keep_alive)
        return True

    @property
    def _is_free(self) -> bool:
        """True if no request is being answered here."""
        return (self.cycle is None or self.cycle.response_complete) and not self.pipeline

    # -- callbacks of the parser ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._begun_s, self._own_cycle, self._num_body_bytes = self.loop.time(), None, 0
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
        self._restart()
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
        before = self.cycle
        super().on_headers_complete()
        self._own_cycle = self.cycle if self.cycle is not before else None

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        self._restart()
        if self._refusal is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._begun_s, self._own_cycle = None, None
        self._is_within = self._has_headers = False
        refusal, self._refusal = self._refusal, None
        if refusal is None:
            super().on_message_complete()
            return
        keep = self.parser.should_keep_alive() and self.parser.get_http_version() != "1.0"
        self.transport.write(refusal.to_bytes(keep=keep))
        if not keep:
            self.transport.close()
        self.on_response_complete()

    def _restart(self) -> None:
        self._num_head_bytes = 0
        self._num_restarts += 1

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
        self._pay()

    def _stop_where_answers_pile_up(self) -> None:
        """Stop reading if answers pile up; while one is computed, read on to notice the end of the connection."""
        if self.flow.write_paused and self._is_free:
            self.flow.pause_reading()

    # -- timers --------------------------------------------------------------------------------------------------------

    def _wait_for_more(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection unless a request was refused meanwhile: resetting the timer at each would cost more."""
        left_s = self._refused_s + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self._wait_for_more(left_s)
        else:
            super().timeout_keep_alive_handler()

    def _be_patient(self, seconds: float) -> None:
        self._patience = self.loop.call_later(seconds, self._lose_patience)

    def _lose_patience(self) -> None:
        self._patience = None
        if self._begun_s is None or self._owed is not None or self.transport.is_closing():
            return
        if self.flow.read_paused or self._is_answering_before:  # the delay is not the client's fault
            self._begun_s = self.loop.time()
        left_s = self._begun_s + self._read_timeout_s + self._num_body_bytes / _LEAST_BYTES_PER_S - self.loop.time()
        if left_s > 0:
            self._be_patient(left_s)
        elif self._is_within:
            text = (
                f"The request did not come within {self._read_timeout_s:g} s. Send it faster, or raise "
                "http.read_timeout_s."
            )
            self._end_with(408, text)
        else:
            self.transport.close()

    # -- the end, where a request cannot be read -----------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """End with an error in our form: uvicorn would send plain text, and record nothing."""
        if self._num_head_bytes > MOST_HEAD_BYTES:
            self._end_with(431, _HEAD_TOO_LARGE)
        else:
            self._end_with(400, _NO_HTTP)

    def _end_with(self, status: int, text: str) -> None:
        """Answer the request being read with this, after those before it, and close the connection."""
        self._owed = (status, text)
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
            return
        scope = cast("dict[str, Any]", self.scope) if self._has_headers else {}
        self._shedding.refusals.note(
            status,
            request_id,
            0.0 if self._begun_s is None else self.loop.time() - self._begun_s,
            method=scope.get("method", ""),
            path=self.url.partition(b"?")[0] if self._has_headers else b"",
            client=self._host,
            num_bytes=len(body),
        )

    @property
    def _is_answering_before(self) -> bool:
        """True if an earlier request than the one being read is still being answered."""
        return bool(self.pipeline) or (
            self._own_cycle is None and self.cycle is not None and not self.cycle.response_complete
        )
