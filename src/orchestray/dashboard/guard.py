"""The guard before the pages: only GET, only for this host, and no content from or to other sites."""

from __future__ import annotations

import ipaddress
import json
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
_ANY = {"", "0.0.0.0", "::"}  # noqa: S104 - names of them, nothing is bound here


class Guard:
    """A middleware that refuses every method but GET (405), and hosts that are not this one (421).

    A page of another site may resolve its own name to this machine's address (DNS rebinding). The browser then takes
    the answer for that site's. It still sends that site's name as the host.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        """Guard an app; `host` is the address it listens on, as given by the user."""
        self._app = app
        self._host = host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on allowed requests, and refuse others."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif not is_own_host(_header(scope, b"host"), self._host):
            await _refuse(send, 421, "this host name is not the dashboard's: open it by the address that it printed")
        elif scope["method"] != "GET":
            await _refuse(send, 405, "the dashboard only reads: GET is its only method", [(b"allow", b"GET")])
        else:
            await self._app(scope, receive, _with_headers(send))


def is_own_host(header: str, listening_on: str) -> bool:
    """Return True if a Host header names this server: its address or a name of this machine."""
    name = _name_of(header)
    if name in {"localhost", listening_on.lower()}:
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return listening_on in _ANY and name in {socket.gethostname().lower(), socket.getfqdn().lower()}
    # An address is not a name that an attacker could point here.
    return address.is_loopback or listening_on in _ANY


def _name_of(header: str) -> str:
    """Return the host of a Host header, without the port and the brackets of IPv6."""
    host = header.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _header(scope: Scope, name: bytes) -> str:
    values = [value for key, value in scope["headers"] if key == name]
    return values[0].decode("latin-1") if len(values) == 1 else ""


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            present = {key.lower() for key, _ in message["headers"]}
            own = [(key.encode(), value.encode()) for key, value in _HEADERS.items() if key.encode() not in present]
            message = {**message, "headers": [*message["headers"], *own]}
        await send(message)

    return sending


async def _refuse(send: Send, status: int, why: str, more: list[tuple[bytes, bytes]] | None = None) -> None:
    body = json.dumps({"error": why}).encode()
    own = [(key.encode(), value.encode()) for key, value in _HEADERS.items()]
    length = (b"content-length", str(len(body)).encode())
    headers = [(b"content-type", b"application/json"), length, *(more or []), *own]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
