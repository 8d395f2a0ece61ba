"""Responses, their JSON bodies, and the headers by which pages of other origins may read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import orjson
from starlette.responses import Response


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response with values and arrays as JSON."""
    return Response(to_json(value), status, headers, media_type="application/json")


def to_json(value: Any) -> bytes:
    """Return values and arrays as a line of JSON; its line end puts a terminal's prompt below it."""
    return orjson.dumps(value, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"no JSON for a {type(value).__name__}")


Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]
EXPOSED = ("x-request-id", "x-model-version", "retry-after", "x-ignored")
"""Headers that a page may read besides those that it always may."""


def cors_headers(origins: Sequence[str], origin: bytes | None) -> Headers:
    """Return the headers by which a page of `origin` may read an answer that the application does not give.

    Args:
        origins: origins whose pages may ask; `*`: any.
        origin: the request's header; None: no page of another origin asks.
    """
    if origin is None or not ("*" in origins or origin.decode("latin-1") in origins):
        return ()
    allowed = b"*" if "*" in origins else origin
    exposed = ", ".join(EXPOSED).encode()
    return (
        (b"access-control-allow-origin", allowed),
        (b"access-control-expose-headers", exposed),
        (b"vary", b"Origin"),
    )
