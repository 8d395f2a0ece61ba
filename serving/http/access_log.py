"""A line of JSON for each request."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, TextIO

import orjson

from orchestray.serving.http.call import Call

ACCESS_LOGGER = "orchestray.serving.access"


def log_access_to(stream: TextIO) -> None:
    """Have the lines written there, and nowhere else: for programs that set up no logging of their own."""
    logger, handler = logging.getLogger(ACCESS_LOGGER), logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)


class AccessLog:
    """Writes to the logger `orchestray.serving.access`, at the level INFO: who runs the process gives it a handler."""

    def __init__(self) -> None:
        self._log = logging.getLogger(ACCESS_LOGGER)

    def write(self, scope: Mapping[str, Any], call: Call, seconds: float) -> None:
        """A request was answered; status 499: its client left before."""
        if not self._log.isEnabledFor(logging.INFO):
            return
        client = scope.get("client")
        line = {
            "time_s": round(time.time(), 6),
            "request_id": call.request_id,
            "method": scope["method"],
            "path": scope["path"],
            "status": call.status,
            "ms": round(seconds * 1e3, 3),
            "bytes": call.num_body_bytes,
            "client": client[0] if client else None,
        }
        if call.model:
            line |= {"model": call.model, "version": call.version}
        if call.token is not None:
            line["token"] = call.token.name
        self._log.info("%s", orjson.dumps(line).decode())
