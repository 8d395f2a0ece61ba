"""The context of one request: its token, its limits, and its outcome."""

from __future__ import annotations

import asyncio
import itertools
import math
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from opentelemetry import trace

from orchestray.serving.http.auth import Token
from orchestray.serving.http.problems import wrong_input
from orchestray.serving.routing.endpoint import ModelVersion

if TYPE_CHECKING:
    from orchestray.serving.http.server.connections import GuardedConnection

SCOPE_KEY = "orchestray.call"
"""Key of a request's `Call` in its scope, where the middleware puts it."""
ARRIVED_KEY = "orchestray.arrived_s"
"""Key of a request's arrival time in its scope, on the loop's clock; that may be before it was read."""
CONNECTION_KEY = "orchestray.connection"
"""Key of a request's `GuardedConnection` in its scope, if that is its server's."""
_SANE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_WHOLE = re.compile(rb"[+-]?\d{1,9}")
_PROCESS_ID, _NUMBERS = secrets.token_hex(4), itertools.count(secrets.randbits(24))
CLIENT_GONE = 499
"""Status of requests whose client has left (nginx's number for it); only in metrics and the log."""
LONGEST_TIMEOUT_MS = 86_400_000.0
_MOST_PRIORITY = 100

TIMEOUT_HEADER = "X-Request-Timeout-Ms"
PRIORITY_HEADER = "X-Request-Priority"
_TIMEOUT_KEY, _PRIORITY_KEY = TIMEOUT_HEADER.lower().encode(), PRIORITY_HEADER.lower().encode()


class Call:
    """The facts about a request besides its body.

    Args:
        headers: by lower-case name, as in ASGI.
        timeout_s: seconds to the deadline of a request that sets none; None: no deadline.
        arrived_s: time of its arrival on the loop's clock, if before now.
    """

    def __init__(
        self, headers: Mapping[bytes, bytes], timeout_s: float | None = None, *, arrived_s: float | None = None
    ) -> None:
        self.headers = headers
        self.started_s = time.perf_counter()
        self._arrived_s = asyncio.get_running_loop().time() if arrived_s is None else arrived_s
        self.request_id = id_of(headers.get(b"x-request-id"))
        self.span = trace.get_current_span()
        """Span of the request; one that records nothing, if there are none."""
        self.token: Token | None = None
        self.model = ""
        self.version = ""
        self.asked_version: str | None = None
        """Version that the request names; None: any."""
        self.status = 0
        self.num_body_bytes = 0
        self.client_gone = False
        self.gone_status = CLIENT_GONE
        """Status to record if the client has left."""
        self._timeout_s = timeout_s

    def reaches(self, version: ModelVersion) -> None:
        """Record the version that will answer, for metrics and the log."""
        self.model, self.version = version.name, version.version

    def describe(self) -> None:
        """Add the facts about the request to its span, unless that has ended."""
        if self.span.is_recording():
            self.span.set_attributes(
                {
                    "http.response.status_code": self.status,
                    "orchestray.request_id": self.request_id,
                    "orchestray.model": self.model,
                    "orchestray.version": self.version,
                }
            )

    @cached_property
    def deadline_s(self) -> float | None:
        """Time after which the answer is useless, on the loop's clock.

        Raises:
            HttpProblem: 422, the header is not a number of milliseconds in the allowed range.
        """
        given = self.headers.get(_TIMEOUT_KEY)
        if given is None:
            return None if self._timeout_s is None else self._arrived_s + self._timeout_s
        try:
            timeout_ms = float(given)
        except ValueError:
            timeout_ms = math.nan
        if not 0 <= timeout_ms <= LONGEST_TIMEOUT_MS:
            raise wrong_input(TIMEOUT_HEADER, f"milliseconds, from 0 to {LONGEST_TIMEOUT_MS:.0f}", _shown(given))
        return self._arrived_s + timeout_ms / 1e3

    @property
    def priority(self) -> int:
        """Priority of the request; higher goes first.

        Raises:
            HttpProblem: 422, the header is not an integer in the allowed range.
        """
        given = self.headers.get(_PRIORITY_KEY)
        if given is None:
            return 0
        priority = priority_of(given)
        if priority is None:
            raise wrong_input(
                PRIORITY_HEADER, f"a whole number from -{_MOST_PRIORITY} to {_MOST_PRIORITY}", _shown(given)
            )
        return priority


class ClientWatch:
    """A context manager in which a client that closes its connection cancels the task.

    `Call.client_gone` then distinguishes this cancellation from one by the server. With a `GuardedConnection` it
    costs one call; with ASGI alone it needs a task of its own.
    """

    def __init__(
        self, call: Call, receive: Callable[[], Awaitable[Any]], connection: GuardedConnection | None = None
    ) -> None:
        self._call = call
        self._connection = connection
        self._receive = receive
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        if self._connection is not None:
            self._connection.watch(self._gone)
        else:
            self._watching = asyncio.get_running_loop().create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.unwatch()
        elif self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone()

    def _gone(self) -> None:
        self._call.client_gone = True
        self._task.cancel()


def priority_of(given: bytes) -> int | None:
    """Return the priority in a header; None if it is not an integer in the allowed range."""
    priority = int(given) if _WHOLE.fullmatch(given) else None
    return priority if priority is not None and abs(priority) <= _MOST_PRIORITY else None


def id_of(given: bytes | None) -> str:
    """Return the id of a request: the one it came with, if that is usable, or a new one."""
    if given is not None and _SANE_ID.fullmatch(given):
        return given.decode()
    return new_id()


def new_id() -> str:
    """Return an id that no other request has: a random prefix of the process, and a counter."""
    return f"{_PROCESS_ID}{next(_NUMBERS):08x}"


def _shown(given: bytes) -> str:
    return repr(given[:100].decode("latin-1"))
