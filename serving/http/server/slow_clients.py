"""Connections with a time limit: a client could otherwise hold one by sending a request byte by byte.

The limits are those of Apache's mod_reqtimeout: a time for the headers, the same for a body, and more while the body
comes fast enough.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from orchestray.serving.http.access_log import AccessLog
from orchestray.serving.http.server.reading import ReadingConnection

_LEAST_BYTES_PER_S = 16_384
"""Rate of a body above which it may take any time."""


class ImpatientConnection(ReadingConnection):
    """A connection that ends with a 408 if a request takes too long to come, and silently if none has begun.

    A request that comes in one piece costs nothing extra: a timer is set only for one that is incomplete.

    Args:
        read_timeout_s: seconds that a client may take.
        more: arguments of a `ReadingConnection`.
    """

    def __init__(self, *, read_timeout_s: float, **more: Any) -> None:
        super().__init__(**more)
        self._read_timeout_s = read_timeout_s
        self._num_body_bytes = 0
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
        self._num_body_bytes = 0
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        super().on_body(body)

    def _be_patient(self, seconds: float) -> None:
        self._patience = self.loop.call_later(seconds, self._lose_patience)

    def _lose_patience(self) -> None:
        self._patience = None
        if self._begun_s is None or self._has_given_up or self.transport.is_closing():
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
            self.end_with(408, text)
        else:
            self.transport.close()


def impatient(
    base: type[HttpToolsProtocol], read_timeout_s: float, refusals: AccessLog | None = None
) -> type[HttpToolsProtocol]:
    """Return the class of connections for uvicorn to use: `base` with a time limit for reading a request.

    Args:
        base: class that handles the requests.
        read_timeout_s: seconds that a client may take for one.
        refusals: recorder of answers that a connection gives by itself; None: not recorded.
    """

    class Impatient(ImpatientConnection, base):  # type: ignore[misc, valid-type]
        def __init__(self, **more: Any) -> None:
            super().__init__(read_timeout_s=read_timeout_s, refusals=refusals, **more)

    return Impatient
