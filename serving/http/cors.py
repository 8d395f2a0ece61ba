"""Pages of other origins: which may read answers, those of the application and those that come before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]
_EXPOSED = ("x-request-id", "x-model-version", "retry-after", "x-ignored")
"""Headers that a page may read besides those that it always may."""


def add_cors(app: FastAPI, origins: Sequence[str]) -> None:
    """Have an application let pages of these origins ask from a browser; `*`: of any."""
    app.add_middleware(
        CORSMiddleware, allow_origins=[*origins], allow_methods=["*"], allow_headers=["*"], expose_headers=_EXPOSED
    )


def cors_headers(origins: Sequence[str], origin: bytes | None) -> Headers:
    """Return the headers by which a page of `origin` may read an answer that the application does not give.

    Args:
        origins: origins whose pages may ask; `*`: any.
        origin: the request's header; None: no page of another origin asks.
    """
    if origin is None or not ("*" in origins or origin.decode("latin-1") in origins):
        return ()
    allowed = b"*" if "*" in origins else origin
    exposed = ", ".join(_EXPOSED).encode()
    return (
        (b"access-control-allow-origin", allowed),
        (b"access-control-expose-headers", exposed),
        (b"vary", b"Origin"),
    )
