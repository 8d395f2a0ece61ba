"""Heads of requests, as far as it takes to refuse one: clients that come again and again send the same."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from orchestray.serving.http.call import LONGEST_TIMEOUT_MS, PRIORITY_HEADER, TIMEOUT_HEADER, priority_of

_BEGIN, _VERSION, _END = b"POST ", b" HTTP/1.1", b"\r\n\r\n"
_TIMEOUT = TIMEOUT_HEADER.lower().encode()
_PRIORITY = PRIORITY_HEADER.lower().encode()
_NAMES_A_MODEL = frozenset({b"x-model", b"x-model-version"})
_CHANGES_READING = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"proxy-connection"})
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TARGET = re.compile(rb"/[!-~]*")
_PREDICT = b"/predict"
_MOST_BYTES, _MOST_KNOWN, _MOST_DIGITS = 2048, 512, 18


@dataclass(frozen=True)
class Wish:
    """What a POST says of itself before its body."""

    timeout_s: float | None
    """None: it does not say."""
    given_id: bytes | None
    is_plain: bool
    """It is for `/predict` of whatever model, with whatever priority is usual."""
    path: bytes = field(default=b"", compare=False)
    """As it came, without the query: for the log alone."""
    priority: int = 0
    """Higher goes first."""


@dataclass(frozen=True)
class Head:
    """Of a POST by HTTP/1.1 over a connection that is kept, whose body has the length that is said."""

    wish: Wish
    num_bytes: int
    """Of the whole request."""


def wish_of(target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> Wish:
    """What a request says of itself; `target` is path and query, `headers` are by lower-case names."""
    timeout_s, given_id, priority, is_plain = None, None, 0, target == _PREDICT
    for name, value in headers:
        if name == _TIMEOUT:
            timeout_s = _seconds(value)
        elif name == b"x-request-id":
            given_id = value
        elif name == _PRIORITY:
            priority, is_plain = priority_of(value) or 0, False  # what is wrong with it the application says
        elif name in _NAMES_A_MODEL:
            is_plain = False
    return Wish(timeout_s, given_id, is_plain, target.partition(b"?")[0], priority)


class Heads:
    """Reads heads, each once: those without an id of their own are remembered."""

    def __init__(self) -> None:
        self._known: dict[bytes, Head | None] = {}

    def read(self, data: bytes) -> Head | None:
        """The head of a request that is all of `data`; None where that is not certain: the parser is to read it."""
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


def _read(raw: bytes) -> Head | None:
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
    return Head(wish_of(target, headers), len(raw) + len(_END) + num_body_bytes)


def _seconds(value: bytes) -> float:
    """Of the header; what the application refuses has all the time in the world."""
    try:
        timeout_ms = float(value)
    except ValueError:
        return math.inf
    return timeout_ms / 1e3 if 0 <= timeout_ms <= LONGEST_TIMEOUT_MS else math.inf
