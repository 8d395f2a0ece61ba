"""Outermost, before anything is made of a request: what has waited too long to be read is refused at the least cost."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from orchestray.serving.http.call import LONGEST_TIMEOUT_MS, TIMEOUT_HEADER
from orchestray.serving.http.monitor import Monitor
from orchestray.serving.http.pressure import Pressure

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

WAITED_KEY = "orchestray.waited_s"
"""In a request's scope: how long it has waited to be read."""
_TIMEOUT = TIMEOUT_HEADER.lower().encode()
_LONGEST_WAIT_S = 1.0
"""For a request without a deadline; with one, half of what it has."""


class Shedding:
    """Passes requests on to an application, but for those whose answer would be late.

    A refusal has to cost far less than an answer: where more come than can be read, there are many.
    """

    def __init__(self, monitor: Monitor, timeout_s: float | None = None) -> None:
        """
        Args:
            monitor: counts what is refused.
            timeout_s: deadline where a request names none; None: none.
        """
        self._monitor = monitor
        self._timeout_s = timeout_s
        self._pressure = Pressure()

    async def __call__(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request by the application, or refuse it."""
        if scope["type"] == "http" and scope["method"] == "POST":
            waited_s = self._pressure.waited_s(asyncio.get_running_loop())
            if waited_s:
                if waited_s > self._longest_wait_s(scope):
                    self._monitor.answered("", "", 503, waited_s)
                    await _refuse(send, waited_s)
                    return
                scope[WAITED_KEY] = waited_s
        await app(scope, receive, send)

    def _longest_wait_s(self, scope: Scope) -> float:
        for name, value in scope["headers"]:
            if name == _TIMEOUT:
                try:
                    timeout_ms = float(value)
                except ValueError:
                    return math.inf  # the application says what is wrong with it
                return timeout_ms / 2e3 if 0 <= timeout_ms <= LONGEST_TIMEOUT_MS else math.inf
        return _LONGEST_WAIT_S if self._timeout_s is None else self._timeout_s / 2


async def _refuse(send: Send, waited_s: float) -> None:
    body = b'{"error":"More requests come than this endpoint can read. Retry in %.3f s.","retry_after_s":%.3f}' % (
        waited_s,
        waited_s,
    )
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"retry-after", b"%d" % max(1, math.ceil(waited_s))),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
