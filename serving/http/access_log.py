"""An access log with a line of JSON for each request."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, TextIO

import orjson

from orchestray.serving.http.request_context import Call

ACCESS_LOGGER = "orchestray.serving.access"


def log_access_to(stream: TextIO) -> None:
    """Write the access log to this stream and nowhere else, for programs that configure no logging of their own."""
    logger, handler = logging.getLogger(ACCESS_LOGGER), logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)


class AccessLog:
    """An access log on the logger `orchestray.serving.access`, level INFO; the process must give that a handler."""

    def __init__(self) -> None:
        self._log = logging.getLogger(ACCESS_LOGGER)

    @property
    def is_on(self) -> bool:
        """True if the logger's level lets the lines through."""
        return self._log.isEnabledFor(logging.INFO)

    def write(self, scope: Mapping[str, Any], call: Call, seconds: float) -> None:
        """Write the line of a request that the application has answered; status 499: its client left before.

        Args:
            scope: ASGI scope of the request.
            call: its context.
            seconds: time from its arrival to the end of its answer.
        """
        if not self.is_on:
            return
        client = scope.get("client")
        self.line(
            call.request_id,
            call.status,
            seconds,
            method=scope["method"],
            path=scope["path"],
            client=client[0] if client else None,
            num_bytes=call.num_body_bytes,
            model=call.model,
            version=call.version,
            token=None if call.token is None else call.token.name,
        )

    def line(
        self,
        request_id: str,
        status: int,
        seconds: float,
        *,
        method: str,
        path: str,
        client: str | None,
        num_bytes: int,
        model: str = "",
        version: str = "",
        token: str | None = None,
    ) -> None:
        """Write one line; empty values were unknown or absent."""
        line = {
            "time_s": round(time.time(), 6),
            "request_id": request_id,
            "method": method,
            "path": path,
            "status": status,
            "ms": round(seconds * 1e3, 3),
            "bytes": num_bytes,
            "client": client,
        }
        if model:
            line |= {"model": model, "version": version}
        if token is not None:
            line["token"] = token
        self._log.info("%s", orjson.dumps(line).decode())
