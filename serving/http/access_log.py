"""Records of answers, those of the application and those that it did not give: counts, and lines of JSON."""

from __future__ import annotations

import logging
import time
from typing import TextIO

import orjson

from orchestray.serving.http.auth import Token
from orchestray.serving.http.monitor import Monitor
from orchestray.serving.http.settings import HttpSettings

ACCESS_LOGGER = "orchestray.serving.access"


def log_access_to(stream: TextIO) -> None:
    """Write the access log to this stream and nowhere else, for programs that configure no logging of their own."""
    logger, handler = logging.getLogger(ACCESS_LOGGER), logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)


class AccessLog:
    """A recorder of answers: it counts them, and writes a line for each, if enabled.

    Lines go to the logger `orchestray.serving.access`, level INFO; the process must give that a handler.

    Args:
        monitor: counts the answers.
        settings: decide if there are lines.
    """

    def __init__(self, monitor: Monitor, settings: HttpSettings) -> None:
        self._log = logging.getLogger(ACCESS_LOGGER)
        self._monitor = monitor
        self.follow(settings)

    def follow(self, settings: HttpSettings) -> None:
        """Use other settings from now on."""
        self._has_lines = settings.access_log

    def note(
        self,
        status: int,
        request_id: str,
        seconds: float,
        *,
        method: str = "POST",
        path: str | bytes = "",
        client: str | None = None,
        num_bytes: int = 0,
        model: str = "",
        version: str = "",
        token: Token | None = None,
    ) -> None:
        """Record an answer; under overload there are many, so that each must cost little.

        Args:
            status: status of the answer; 499: its client left before.
            request_id: id of the request.
            seconds: time from the arrival of the request to the end of its answer.
            method: method of the request; empty: not read yet.
            path: path without the query, unmodified; empty: not read yet.
            client: address of the client.
            num_bytes: size of the answer's body.
            model, version: version that has answered, or would have; empty: unknown.
            token: token of the request.
        """
        self._monitor.answered(model, version, status, seconds, method=method)
        if not self._has_lines or not self._log.isEnabledFor(logging.INFO):
            return
        line = {
            "time_s": round(time.time(), 6),
            "request_id": request_id,
            "method": method,
            "path": path if isinstance(path, str) else path.decode("latin-1"),
            "status": status,
            "ms": round(seconds * 1e3, 3),
            "bytes": num_bytes,
            "client": client,
        }
        if model:
            line |= {"model": model, "version": version}
        if token is not None:
            line["token"] = token.name
        self._log.info("%s", orjson.dumps(line).decode())
