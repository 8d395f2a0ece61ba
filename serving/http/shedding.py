"""Outermost, before anything is made of a request: what would come late is refused at the least cost."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestray.serving.http.call import ARRIVED_KEY, LONGEST_TIMEOUT_MS, PRIORITY_HEADER, TIMEOUT_HEADER, id_of
from orchestray.serving.http.monitor import Monitor
from orchestray.serving.http.pressure import Pressure
from orchestray.serving.http.settings import HttpSettings
from orchestray.serving.models.endpoint import ModelVersion
from orchestray.serving.models.registry import Registry

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_TIMEOUT = TIMEOUT_HEADER.lower().encode()
_NAMES_A_MODEL = frozenset({PRIORITY_HEADER.lower().encode(), b"x-model", b"x-model-version"})
_PREDICT = b"/predict"
_ANY_TIME_S = 10.0
"""What a request without a deadline is taken to have."""


@dataclass(frozen=True)
class Refusal:
    """A 503."""

    headers: list[tuple[bytes, bytes]]
    body: bytes

    def to_bytes(self, *, keep: bool) -> bytes:
        """As it goes over a connection, which is kept or closed."""
        lines = [b"HTTP/1.1 503 Service Unavailable", *(b"%s: %s" % header for header in self.headers)]
        if not keep:
            lines.append(b"connection: close")
        return b"\r\n".join([*lines, b"", self.body])


class Shedding:
    """Says which requests are not worth beginning with. A refusal has to cost far less than an answer.

    Args:
        monitor: counts what is refused.
        settings: limits and tokens.
        models: whose queues are looked at.
    """

    def __init__(self, monitor: Monitor, settings: HttpSettings, models: Registry) -> None:
        self._monitor = monitor
        self._models = models
        self._pressure = Pressure()
        self.follow(settings)

    def follow(self, settings: HttpSettings) -> None:
        """Other settings are in force."""
        self._timeout_s = settings.timeout_s
        self._is_open = not settings.tokens  # who has no token is not told about queues

    @property
    def waited_s(self) -> float:
        """How long what is read now has waited for that."""
        return self._pressure.waited_s

    async def __call__(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request by the application, or refuse it; what the connection has let through is answered."""
        if scope["type"] == "http" and scope["method"] == "POST" and ARRIVED_KEY not in scope:
            loop = asyncio.get_running_loop()
            target = b"" if scope["query_string"] else scope["path"].encode("utf-8", "replace")
            refusal = self.refusal(loop, target, scope["headers"])
            if refusal is not None:
                await send({"type": "http.response.start", "status": 503, "headers": refusal.headers})
                await send({"type": "http.response.body", "body": refusal.body})
                return
            if waited_s := self.waited_s:
                scope[ARRIVED_KEY] = loop.time() - waited_s
        await app(scope, receive, send)

    def refusal(
        self, loop: asyncio.AbstractEventLoop, target: bytes, headers: Sequence[tuple[bytes, bytes]]
    ) -> Refusal | None:
        """What a POST is to be answered with at once; None: it is to be answered by the application.

        Args:
            loop: the one that reads it.
            target: path and query.
            headers: by lower-case names.
        """
        timeout_s, given_id, is_plain = self._timeout_s, None, target == _PREDICT
        for name, value in headers:
            if name == _TIMEOUT:
                timeout_s = _seconds(value)
            elif name == b"x-request-id":
                given_id = value
            elif name in _NAMES_A_MODEL:
                is_plain = False
        version = self._only_version() if is_plain else None
        num_before = self._pressure.num_taken
        num_rounds = 0.0 if version is None else version.batcher.num_rounds(num_before)
        if not self._pressure.admits(loop, _ANY_TIME_S if timeout_s is None else timeout_s, num_rounds):
            self._monitor.answered("", "", 503, self.waited_s)
            retry_s = self._pressure.taken_s + self.waited_s
            text = f"More requests come than this endpoint can read. Retry in {retry_s:.3g} s."
            return _refusal(text, retry_s, given_id)
        if version is None:
            return None
        deadline_s = None if timeout_s is None else loop.time() - self.waited_s + timeout_s
        error = version.batcher.refusal(deadline_s, num_coming=num_before)
        if error is None:
            return None
        self._pressure.refused()
        self._monitor.answered(version.name, version.version, 503, self.waited_s)
        return _refusal(str(error), error.retry_after_s or 0.0, given_id)

    def _only_version(self) -> ModelVersion | None:
        """Who will answer, where that is certain before the request is read."""
        if not (self._is_open and self._models.ready):
            return None
        versions = self._models.default.versions
        return versions[0] if len(versions) == 1 else None


def _seconds(value: bytes) -> float:
    """Of the header; what the application refuses has all the time in the world."""
    try:
        timeout_ms = float(value)
    except ValueError:
        return math.inf
    return timeout_ms / 1e3 if 0 <= timeout_ms <= LONGEST_TIMEOUT_MS else math.inf


def _refusal(text: str, retry_s: float, given_id: bytes | None) -> Refusal:
    request_id = id_of(given_id).encode()
    body = b'{"error":"%s","request_id":"%s","retry_after_s":%.6f}\n' % (text.encode(), request_id, retry_s)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"retry-after", b"%d" % max(1, math.ceil(retry_s))),
        (b"x-request-id", request_id),
    ]
    return Refusal(headers, body)
