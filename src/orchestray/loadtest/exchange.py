"""Single requests, to learn what an endpoint expects before it is measured."""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import dataclass, replace
from typing import Any

from orchestray.loadtest.plan import Target
from orchestray.loadtest.results import EndpointError

_SHOWN_CHARACTERS = 300


@dataclass(frozen=True)
class Answer:
    """An answer to one request."""

    status: int
    body: bytes

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    def json(self) -> Any:
        """Return the parsed body; None if it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    def text(self) -> str:
        """Return the beginning of the body."""
        text = " ".join(self.body.decode("utf-8", errors="replace").split())
        return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def exchange(target: Target, *, timeout_s: float, path: str | None = None) -> Answer:
    """Send one request: the target's own, or a GET of another path of its server.

    Args:
        target: server, path and request.
        timeout_s: time the server has to answer.
        path: another path; default: the target's.

    Raises:
        EndpointError: no answer came; the text gives the reason and a remedy.
    """
    made = target if path is None else replace(target, path=path, method="GET", bodies=())
    context = made.context()
    connection = http.client.HTTPConnection(made.host, made.port, timeout=timeout_s)
    if context is not None:
        connection = http.client.HTTPSConnection(made.host, made.port, timeout=timeout_s, context=context)
    try:
        connection.request(made.method, made.path, made.bodies[0] if made.bodies else None, dict(made.fields))
        got = connection.getresponse()
        return Answer(got.status, got.read())
    except (OSError, http.client.HTTPException) as error:
        raise EndpointError(_why(made, error, timeout_s)) from error
    finally:
        connection.close()


def _why(target: Target, error: Exception, timeout_s: float) -> str:
    where = f"{target.host}:{target.port}"
    if isinstance(error, ConnectionRefusedError):
        return f"Nothing listens on {where}: the connection was refused. Is the endpoint running, on that port?"
    if isinstance(error, TimeoutError):
        return f"{target.url} gave no answer within {timeout_s:g} s; --timeout-s gives it longer."
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"The certificate of {where} is not trusted ({error.verify_message}); --insecure takes it as it is."
    if isinstance(error, ssl.SSLError):
        return f"{where} does not speak TLS: try http:// in place of https://. ({error.reason})"
    if isinstance(error, http.client.HTTPException):
        return f"{where} does not answer in HTTP ({type(error).__name__}); a server of https:// may be behind it."
    return f"{where} cannot be reached: {getattr(error, 'strerror', None) or error}."
