"""Requests to an ASGI application, without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlencode


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)


def request(
    app: Any,
    path: str,
    params: Mapping[str, object] | None = None,
    *,
    method: str = "GET",
    host: str = "127.0.0.1:8266",
) -> Answer:
    """Ask once; the answer must end."""
    received: list[dict[str, Any]] = []
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": urlencode(params or {}).encode(),
        "root_path": "",
        "headers": [(b"host", host.encode())],
        "client": ("127.0.0.1", 40000),
        "server": ("127.0.0.1", 8266),
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        received.append(message)

    asyncio.run(app(scope, receive, send))
    start, *bodies = received
    headers = {key.decode().lower(): value.decode() for key, value in start["headers"]}
    return Answer(start["status"], headers, b"".join(each.get("body", b"") for each in bodies))
