"""Load shedding before any other work on a request: one that would be late is refused at the least cost."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from orchestray.serving.batching import Batcher
from orchestray.serving.http.access_log import AccessLog
from orchestray.serving.http.monitor import Monitor
from orchestray.serving.http.overload.heads import RequestHints, wish_of
from orchestray.serving.http.overload.pressure import OverloadDetector
from orchestray.serving.http.problems import HttpProblem, openai_error
from orchestray.serving.http.request_context import ARRIVED_KEY, id_of, new_id
from orchestray.serving.http.responses import Headers, cors_headers, to_json
from orchestray.serving.http.settings import HttpSettings
from orchestray.serving.routing.endpoint import ModelVersion
from orchestray.serving.routing.registry import Registry

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_ANY_TIME_S = 10.0
"""Seconds that a request without a deadline is assumed to have."""
_NUM_ID_BYTES = len(new_id())
_HEAD = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    b"retry-after: %d\r\nx-request-id: %s\r\n%s\r\n%s"
)


@dataclass(frozen=True)
class Refusal:
    """A 503 answer.

    Args:
        text: reason for the client.
        retry_s: seconds after which to retry.
        request_id: id of the request.
        model, version: model version of the request; empty: unknown.
        is_openai: True if its body is to be in the form of OpenAI's API.
        more: further headers.
    """

    text: str
    retry_s: float
    request_id: str
    model: str = ""
    version: str = ""
    is_openai: bool = False
    more: Headers = ()

    @property
    def body(self) -> bytes:
        if self.is_openai:
            return to_json({**openai_error(HttpProblem(503, self.text)), "request_id": self.request_id})
        values = (self.text.encode(), self.request_id.encode(), self.retry_s)
        return b'{"error":"%s","request_id":"%s","retry_after_s":%.6f}\n' % values

    @property
    def _retry_header_s(self) -> int:
        return max(1, math.ceil(self.retry_s))

    async def send(self, send: Send) -> None:
        """Send the answer by ASGI."""
        body = self.body
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"retry-after", b"%d" % self._retry_header_s),
            (b"x-request-id", self.request_id.encode()),
            *self.more,
        ]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def to_bytes(self, *, keep: bool, num_id_bytes: int | None = None) -> bytes:
        """Return the answer as bytes; with `num_id_bytes` its id is a placeholder for one of that length.

        Args:
            keep: True if the connection stays open.
            num_id_bytes: length of the id that will replace the placeholder.
        """
        body, more = self.body, self.more if keep else (*self.more, (b"connection", b"close"))
        end = b"".join(b"%s: %s\r\n" % each for each in more)
        num_bytes = len(body) + (0 if num_id_bytes is None else num_id_bytes - len(self.request_id))
        return _HEAD % (num_bytes, self._retry_header_s, self.request_id.encode(), end, body)


@dataclass(frozen=True)
class _Again:
    """A refusal that other requests of the same round of the loop get too, each with an id of its own.

    Args:
        round: number of the round.
        least_s, most_s: range of the time of the requests to which it applies.
        refusal: refusal of the first request.
        batcher: batcher whose queue has refused it; None: it was not read for lack of time.
    """

    round: int
    least_s: float
    most_s: float
    refusal: Refusal
    batcher: Batcher[Any, Any] | None

    @cached_property
    def answer(self) -> bytes:
        """Answer with a placeholder for the id, in head and body."""
        return replace(self.refusal, request_id="%s").to_bytes(keep=True, num_id_bytes=_NUM_ID_BYTES)

    @cached_property
    def num_body_bytes(self) -> int:
        """Size of the answer's body with an id."""
        return len(self.refusal.body) - len(self.refusal.request_id) + _NUM_ID_BYTES


class LoadShedder:
    """A filter that refuses requests that are not worth starting. A refusal must cost far less than an answer.

    Args:
        monitor: counts the refusals.
        settings: limits and tokens.
        models: models whose queues are considered.
    """

    def __init__(self, monitor: Monitor, settings: HttpSettings, models: Registry) -> None:
        self._monitor = monitor
        self._models = models
        self._pressure = OverloadDetector()
        self._arrived_s = -math.inf
        self._again: _Again | None = None
        self.refusals = AccessLog(monitor, settings)
        """Recorder of all answers that the application does not give."""
        self.follow(settings)

    def follow(self, settings: HttpSettings) -> None:
        """Use other settings from now on."""
        self._timeout_s, self._origins = settings.timeout_s, settings.cors_origins
        self._is_open = not settings.tokens  # clients without a token must not learn about queues
        self.refusals.follow(settings)

    @property
    def waited_s(self) -> float:
        """Longest time that a request that is read now has waited for that."""
        return self._pressure.waited_s

    def arrived_s(self, now_s: float) -> float:
        """Return the arrival time of what is read now, on the loop's clock; it never decreases between requests.

        The waiting time of requests is known only in rounds of the loop. By that alone, requests of one round would
        overtake those of the last round with as much time. The queue would then have no room for the overtaken ones.
        """
        self._arrived_s = max(self._arrived_s, now_s - self._pressure.waited_s)
        return self._arrived_s

    def __call__(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Have the application answer a request, or refuse it, unless the connection has already accepted it."""
        if scope["type"] == "http" and scope["method"] == "POST" and ARRIVED_KEY not in scope:
            loop = asyncio.get_running_loop()
            query: bytes = scope["query_string"]
            target = scope["path"].encode("utf-8", "replace") + (b"?" + query if query else b"")
            client = str(scope["client"][0]) if scope.get("client") else None
            refusal = self.refusal(loop, wish_of(target, scope["headers"]), client)
            if refusal is not None:
                return refusal.send(send)
            if self.waited_s:
                scope[ARRIVED_KEY] = self.arrived_s(loop.time())
        return app(scope, receive, send)

    def again(self, wish: RequestHints, client: str | None = None) -> bytes | None:
        """Return the refusal of a request that asks for no more than one refused in this round; None: look closer."""
        known = self._again
        if known is None or self._pressure.number != known.round or not wish.is_plain or wish.given_id is not None:
            return None
        if cors_headers(self._origins, wish.origin):
            return None  # its answer has headers of its own
        timeout_s = self._timeout_s if wish.timeout_s is None else wish.timeout_s
        if not known.least_s <= (_ANY_TIME_S if timeout_s is None else timeout_s) <= known.most_s:
            return None
        self._pressure.refused_again()
        first, request_id = known.refusal, new_id()
        if known.batcher is None:
            self._monitor.shed_early(first.model, first.version)
        else:
            known.batcher.refused_again()
        self._note(first, request_id, known.num_body_bytes, wish, client)
        id_bytes = request_id.encode()
        return known.answer % (id_bytes, id_bytes)

    def refusal(self, loop: asyncio.AbstractEventLoop, wish: RequestHints, client: str | None = None) -> Refusal | None:
        """Return the answer with which to refuse a POST at once; None: the application must answer it.

        Args:
            loop: event loop that reads it.
            wish: hints from its head.
            client: its address, for the log.
        """
        timeout_s = self._timeout_s if wish.timeout_s is None else wish.timeout_s
        version = self._only_version() if wish.is_plain else None
        num_before = self._pressure.num_taken
        deadline_s = None if timeout_s is None else self.arrived_s(loop.time()) + timeout_s
        queue_s = 0.0 if version is None else version.batcher.queue_s(deadline_s, num_coming=num_before)
        allowed_s = _ANY_TIME_S if timeout_s is None else timeout_s
        names = ("", "") if version is None else (version.name, version.version)
        if not self._pressure.admits(loop, allowed_s, queue_s, wish.priority):
            retry_s = self._pressure.taken_s + self.waited_s
            text = f"More requests come than this endpoint can read. Retry in {retry_s:.3g} s."
            self._monitor.shed_early(*names)
            refusal = self._made(text, retry_s, names, wish)
            least_s = 0.0 if self._pressure.refuses_less else allowed_s
            return self._refused(refusal, wish, client, (least_s, allowed_s), None)
        if version is None:
            return None
        error = version.batcher.refusal(deadline_s, num_coming=num_before)
        if error is None:
            return None
        self._pressure.refused()
        refusal = self._made(str(error), error.retry_after_s or 0.0, names, wish)
        # A request with less time precedes those that wait, and may be in time when this one is not.
        return self._refused(refusal, wish, client, (allowed_s, allowed_s), version.batcher)

    def _made(self, text: str, retry_s: float, names: tuple[str, str], wish: RequestHints) -> Refusal:
        more = cors_headers(self._origins, wish.origin)
        return Refusal(text, retry_s, id_of(wish.given_id), *names, is_openai=wish.is_openai, more=more)

    def _refused(
        self,
        refusal: Refusal,
        wish: RequestHints,
        client: str | None,
        range_s: tuple[float, float],
        batcher: Batcher[Any, Any] | None,
    ) -> Refusal:
        """Record a refusal, and keep it for plain requests of this round of the loop whose time is in `range_s`."""
        if wish.is_plain:
            self._again = _Again(self._pressure.number, *range_s, replace(refusal, more=()), batcher)
        self._note(refusal, refusal.request_id, len(refusal.body), wish, client)
        return refusal

    def _note(self, refusal: Refusal, request_id: str, num_bytes: int, wish: RequestHints, client: str | None) -> None:
        self.refusals.note(
            503,
            request_id,
            self.waited_s,
            path=wish.path,
            client=client,
            num_bytes=num_bytes,
            model=refusal.model,
            version=refusal.version,
        )

    def _only_version(self) -> ModelVersion | None:
        """Return the version that will answer, if that is certain before the request is read."""
        if not (self._is_open and self._models.ready):
            return None
        versions = self._models.default.versions
        return versions[0] if len(versions) == 1 else None
