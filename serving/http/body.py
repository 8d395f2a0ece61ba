"""Request bodies: received up to a limit, and parsed once their nesting is known to be harmless."""

from __future__ import annotations

import re
import zlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import orjson
from starlette.requests import ClientDisconnect

from orchestray.serving.http.problems import HttpProblem

# An unterminated string matches to the end of the text: each byte is read once, whatever is sent.
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_LONGEST_LENGTH = 18
"""Most digits of a Content-Length; Python refuses to convert some thousands of them."""
Receive = Callable[[], Awaitable[Any]]
INFLATED = (b"gzip", b"x-gzip", b"deflate")
"""Codings of bodies that are decompressed."""
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
"""The header of the data says which of the two it is."""
_GZIP = 0x1F
"""First byte of gzip; the lower half of zlib's is `DEFLATED`."""
_PIECE_BYTES = 4096
_MOST_DEPTH = 64
"""Deepest nesting of lists and objects."""
_NOT_FINITE = re.compile(rb"\b(NaN|Infinity)\b")
_LONG = re.compile(rb"(?<![\d.eE+-])-?\d{19,}(?![\d.eE])")
_BRACKETS = np.zeros(256, dtype=np.int8)
_BRACKETS[[ord("["), ord("{")]] = 1
_BRACKETS[[ord("]"), ord("}")]] = -1


def check_length(content_length: bytes | None, max_bytes: int) -> None:
    """Refuse a body whose Content-Length says that it is too large.

    Raises:
        HttpProblem: 413.
    """
    if content_length is None or not content_length.isdigit():
        return
    if len(content_length) > _LONGEST_LENGTH or int(content_length) > max_bytes:
        raise too_large(max_bytes)


def too_large(max_bytes: int) -> HttpProblem:
    """Return a 413 that closes the connection, so that the rest of the body need not be read."""
    text = f"The body is larger than {max_bytes} bytes. Send less at once, or raise http.max_body_mb."
    return HttpProblem(413, text, headers={"connection": "close"})


async def read_body(receive: Receive, max_bytes: int) -> bytes:
    """Receive a whole body.

    Args:
        receive: ASGI's `receive`.
        max_bytes: largest body.

    Raises:
        HttpProblem: 413, as soon as the body exceeds the limit.
        ClientDisconnect: the client disconnected before the end.
    """
    message = await receive()
    chunks, num_bytes = [], 0
    while True:
        if message["type"] != "http.request":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise too_large(max_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)
        message = await receive()


class _Inflater:
    """A decompressor of a body, in one member or several, as parallel compressors write it.

    Args:
        max_bytes: largest body, as it comes and decompressed.
        coding: its Content-Encoding; `deflate` may lack the header of zlib (RFC 9110, section 8.4.1.2).
    """

    def __init__(self, max_bytes: int, coding: bytes = b"gzip") -> None:
        self._max_bytes, self._may_be_bare = max_bytes, coding == b"deflate"
        self._num_left = self._num_unread = max_bytes
        self._member = zlib.decompressobj(_GZIP_OR_ZLIB)

    @property
    def is_whole(self) -> bool:
        """True if what has come may be all."""
        return self._member.eof

    def feed(self, data: bytes) -> bytes:
        """Return what the next bytes hold.

        Raises:
            HttpProblem: 413 or 422, the body exceeds the limit, or is damaged.
        """
        if self._may_be_bare and data:
            self._may_be_bare = False
            if data[0] & 15 != zlib.DEFLATED and data[0] != _GZIP:
                self._member = zlib.decompressobj(-zlib.MAX_WBITS)
        self._num_unread -= len(data)
        if self._num_unread < 0:  # members that hold nothing would never end
            raise too_large(self._max_bytes)
        try:
            return b"".join(
                part
                for begin in range(0, len(data), _PIECE_BYTES)  # each member copies what is left of a piece
                for part in self._parts(data[begin : begin + _PIECE_BYTES])
            )
        except zlib.error:
            raise HttpProblem(422, "The body is not what its Content-Encoding says.") from None

    def _parts(self, piece: bytes) -> Iterator[bytes]:
        while piece:
            if self._member.eof:
                self._member = zlib.decompressobj(_GZIP_OR_ZLIB)
            part = self._member.decompress(piece, self._num_left + 1)  # never more than that in memory
            self._num_left -= len(part)
            if self._num_left < 0:
                raise too_large(self._max_bytes)
            yield part
            piece = self._member.unused_data


def inflated(receive: Receive, max_bytes: int, coding: bytes) -> Receive:
    """Return a `receive` that decompresses the body of a request, by gzip or zlib.

    Args:
        receive: ASGI's `receive`.
        max_bytes: largest body, decompressed.
        coding: Content-Encoding of the body.

    Raises:
        HttpProblem: 413 or 422, when it is called: the body exceeds the limit, or is damaged.
    """
    inflater = _Inflater(max_bytes, coding)

    async def receive_inflated() -> Any:
        message = await receive()
        if message["type"] != "http.request":
            return message
        body = inflater.feed(message.get("body", b""))
        if not message.get("more_body", False) and not inflater.is_whole:
            raise HttpProblem(422, "The compressed body ends too early.")
        return {**message, "body": body}

    return receive_inflated


def parse_json(body: bytes | memoryview) -> Any:
    """Parse a JSON text; numbers must be finite, and nothing may be nested deeper than `_MOST_DEPTH`.

    Raises:
        HttpProblem: 422.
    """
    body = bytes(body)
    if body.count(b"[") + body.count(b"{") > _MOST_DEPTH and depth_of(body) > _MOST_DEPTH:
        raise HttpProblem(422, f"The body is nested deeper than {_MOST_DEPTH} lists and objects.")
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if "number is infinity" in str(error) or _NOT_FINITE.search(_STRING.sub(b'""', body)):
            text = "The body has numbers that are not finite: NaN and infinities are refused."
            raise HttpProblem(422, text) from None
        raise HttpProblem(422, f"The body is not JSON: {error}.") from None


def parse_object(body: bytes | memoryview, wanted: str) -> dict[str, Any]:
    """Parse a body that must be a JSON object; `wanted` is an example of one for the error.

    Raises:
        HttpProblem: 422.
    """
    value = parse_json(body)
    if not isinstance(value, dict):
        raise HttpProblem(422, f"The body must be a JSON object: {wanted}.", more={"field": "", "wanted": wanted})
    return value


def long_number(text: bytes) -> str | None:
    """Return a whole number in a JSON text that has more than 64 bits, which a parser makes a float; None: none has."""
    if _LONG.search(text) is None:  # nearly always: strings are looked for only then
        return None
    found = (each.decode() for each in _LONG.findall(_STRING.sub(b'""', text)))
    return next((each for each in found if len(each) > 20 or not -(2**63) <= int(each) < 2**64), None)


def depth_of(text: bytes) -> int:
    """Return how deep lists and objects are nested in a JSON text, valid or not."""
    codes = np.frombuffer(_STRING.sub(b"", text), dtype=np.uint8)
    steps = _BRACKETS[codes]
    return int(np.cumsum(steps[steps != 0], dtype=np.int64).max(initial=0))
