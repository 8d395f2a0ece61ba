"""Connections that do not wait for ever: a client that sends a request byte by byte would hold one as long as it likes.

As Apache's mod_reqtimeout does: so long for the headers, and as long for a body, and more while that comes fast enough.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from orchestray.serving.deployments.reading import ReadingConnection
from orchestray.serving.http.refusals import Refusals

_LEAST_BYTES_PER_S = 16_384
"""Of a body: one that comes faster has all the time it takes."""


class ImpatientConnection(ReadingConnection):
    """Ends with a 408 where a request takes too long to come; without a word where none has begun.

    A request that comes in one piece costs nothing for it: a timer is set where one was begun, and is not whole.

    Args:
        read_timeout_s: that a client may take.
        more: what a `ReadingConnection` is given.
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
        if self.flow.read_paused or self._is_answering_before:  # it is not the client's doing
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
    base: type[HttpToolsProtocol], read_timeout_s: float, refusals: Refusals | None = None
) -> type[HttpToolsProtocol]:
    """The class of connections that uvicorn makes: those of `base`, which wait so long for a request.

    Args:
        base: what is made of requests.
        read_timeout_s: that a client may take for one.
        refusals: are told of what a connection answers by itself; None: nobody is.
    """

    class Impatient(ImpatientConnection, base):  # type: ignore[misc, valid-type]
        def __init__(self, **more: Any) -> None:
            super().__init__(read_timeout_s=read_timeout_s, refusals=refusals, **more)

    return Impatient
