"""A parser of request heads that reads only what a refusal needs, and caches them: repeated requests send the same."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from orchestray.serving.http.request_context import LONGEST_TIMEOUT_MS, PRIORITY_HEADER, TIMEOUT_HEADER, priority_of

_BEGIN, _VERSION, _END = b"POST ", b" HTTP/1.1", b"\r\n\r\n"
_TIMEOUT = TIMEOUT_HEADER.lower().encode()
_PRIORITY = PRIORITY_HEADER.lower().encode()
_NAMES_A_MODEL = frozenset({b"x-model", b"x-model-version"})
_CHANGES_READING = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"proxy-connection"})
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TARGET = re.compile(rb"/[!-~]*")
_PREDICT, _OPENAI = b"/predict", b"/v1/completions"
_MOST_BYTES, _MOST_KNOWN, _MOST_DIGITS = 2048, 512, 18


@dataclass(frozen=True)
class RequestHints:
    """The facts about a POST that are known before its body."""

    timeout_s: float | None
    """Timeout that the request sets; None: it sets none."""
    given_id: bytes | None
    is_plain: bool
    """True if it is for `/predict` without a model, a version or a priority."""
    path: bytes = field(default=b"", compare=False)
    """Path without the query, unmodified; only for the log."""
    priority: int = 0
    """Priority of the request; higher goes first."""
    origin: bytes | None = None
    """Origin of the page that asks from a browser; None: no page does."""

    @property
    def is_openai(self) -> bool:
        """True if the client expects the form of OpenAI's API, under whatever prefix a proxy shows the endpoint."""
        return self.path.endswith(_OPENAI)


@dataclass(frozen=True)
class ParsedHead:
    """The head of a POST over HTTP/1.1 on a kept connection, whose body has a known length."""

    wish: RequestHints
    num_bytes: int
    """Size of the whole request."""


def wish_of(target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> RequestHints:
    """Return the hints of a request.

    Args:
        target: path and query.
        headers: pairs of lower-case name and value.
    """
    timeout_s, given_id, origin, priority, is_plain = None, None, None, 0, target == _PREDICT
    for name, value in headers:
        if name == _TIMEOUT:
            timeout_s = _seconds(value)
        elif name == b"x-request-id":
            given_id = value
        elif name == b"origin":
            origin = value
        elif name == _PRIORITY:
            priority, is_plain = priority_of(value) or 0, False  # the application reports an invalid one
        elif name in _NAMES_A_MODEL:
            is_plain = False
    return RequestHints(timeout_s, given_id, is_plain, target.partition(b"?")[0], priority, origin)


class Heads:
    """A cached reader of heads: those without a request id of their own are parsed once."""

    def __init__(self) -> None:
        self._known: dict[bytes, ParsedHead | None] = {}

    def read(self, data: bytes) -> ParsedHead | None:
        """Return the head of a request that is all of `data`; None: uncertain, the real parser must read it."""
        end = data.find(_END, 0, _MOST_BYTES)
        if end < 0:
            return None
        raw = data[:end]
        if raw in self._known:
            head = self._known[raw]
        else:
            head = _read(raw)
            if head is None or head.wish.given_id is None:
                if len(self._known) >= _MOST_KNOWN:
                    self._known.clear()
                self._known[raw] = head
        return head if head is not None and head.num_bytes == len(data) else None


def _read(raw: bytes) -> ParsedHead | None:
    first, *lines = raw.split(b"\r\n")
    target = first[len(_BEGIN) : -len(_VERSION)]
    if not (first.startswith(_BEGIN) and first.endswith(_VERSION) and _TARGET.fullmatch(target)):
        return None
    headers: list[tuple[bytes, bytes]] = []
    num_body_bytes = None
    for line in lines:
        name, colon, value = line.partition(b":")
        name, value = name.lower(), value.strip(b" \t")
        if not colon or _NAME.fullmatch(name) is None or not value.isascii() or not value.decode().isprintable():
            return None
        if name in _CHANGES_READING or (name == b"connection" and value.lower() != b"keep-alive"):
            return None
        if name == b"content-length":
            if num_body_bytes is not None or not value.isdigit() or len(value) > _MOST_DIGITS:
                return None
            num_body_bytes = int(value)
        headers.append((name, value))
    if num_body_bytes is None:
        return None
    return ParsedHead(wish_of(target, headers), len(raw) + len(_END) + num_body_bytes)


def _seconds(value: bytes) -> float:
    """Return the timeout in a header; infinity for values that the application will refuse."""
    try:
        timeout_ms = float(value)
    except ValueError:
        return math.inf
    return timeout_ms / 1e3 if 0 <= timeout_ms <= LONGEST_TIMEOUT_MS else math.inf
