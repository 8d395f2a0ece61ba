"""Changes to a running endpoint from another process of the same user: one line of JSON each way."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from orchestray.platform.errors import ConfigError, OrchestrayError
from orchestray.serving.lifecycle.name_lock import EndpointInfo

_log = logging.getLogger("orchestray.serving")

_LIMIT_BYTES = 16 * 2**20
_HOST = "127.0.0.1"

Apply = Callable[[dict[str, Any]], Awaitable[str]]
"""Function that applies a config's plain data; returns the changes in words."""
Replace = Callable[[str], Awaitable[str]]
"""Function that has another replica take the place of one, given its name; returns the change in words."""


class ControlServer:
    """A server for changes on a local port, from clients that know the secret, one change at a time."""

    def __init__(self, apply: Apply, secret: str, replace: Replace) -> None:
        self._apply = apply
        self._replace = replace
        self._secret = secret
        self._turn = asyncio.Lock()
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Start to listen; return the port."""
        self._server = await asyncio.start_server(self._accept, _HOST, 0, limit=_LIMIT_BYTES)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        """Take no more changes, and cancel the current one."""
        if self._server is not None:
            self._server.close()
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            try:
                line = await reader.readline()
            except (OSError, ValueError):  # the client is gone, or did not send a line
                return
            answer = json.dumps(await self._answer(line)) + "\n"
            with contextlib.suppress(OSError):
                writer.write(answer.encode())
                await writer.drain()
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            asked = json.loads(line)
            known = _is_secret(asked["secret"], self._secret)
            replica = asked.get("replace")
            data = {} if replica is not None else dict(asked["config"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return {"error": "This is no change of an endpoint.", "exit_status": 2}
        if not known:
            return {"error": "The secret is wrong.", "exit_status": 2}
        async with self._turn:
            try:
                return {"changed": await (self._apply(data) if replica is None else self._replace(str(replica)))}
            except ConfigError as error:
                return {"problems": list(error.problems)}
            except OrchestrayError as error:
                return {"error": str(error), "exit_status": error.exit_status}
            except Exception as error:  # noqa: BLE001 - whatever it is, it is reported to the client
                _log.exception("a change failed")
                text = f"the change failed, and the endpoint's log has more: {type(error).__name__}: {error}"
                return {"error": text, "exit_status": OrchestrayError.exit_status}


def send(standing: EndpointInfo, **what: Any) -> str:
    """Change a running endpoint; return the changes as a sentence, when requests see them.

    Args:
        standing: the endpoint.
        what: `config`, the plain data of the new config; or `replace`, the name of a replica in the metrics, whose
            place another takes.

    Raises:
        ConfigError: the endpoint cannot be changed to that, and goes on as before.
        OrchestrayError: the change failed, and the endpoint goes on as before; or it does not answer.
    """
    try:
        with socket.create_connection((_HOST, standing.control_port)) as connection:
            connection.sendall((json.dumps({"secret": standing.secret, **what}) + "\n").encode())
            line = connection.makefile("rb").readline()
        answer = json.loads(line)
    except (OSError, ValueError) as error:
        raise OrchestrayError(
            f"the endpoint '{standing.name}' does not answer ({error}); is it about to end?"
        ) from error
    if "problems" in answer:
        raise ConfigError(answer["problems"])
    if "error" in answer:
        failed = OrchestrayError(answer["error"])
        failed.exit_status = answer["exit_status"]
        raise failed
    return str(answer["changed"])


def _is_secret(given: object, secret: str) -> bool:
    """Return True if the other side knows the secret; strangers may send anything, even values that are not text."""
    # As bytes: `compare_digest` refuses text that is not ASCII, and JSON may contain lone surrogates.
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="surrogatepass"), secret.encode())
