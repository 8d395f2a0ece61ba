"""Single requests, to learn what an endpoint expects before it is measured."""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from orchestray.loadtest.errors import EndpointError
from orchestray.loadtest.plan import Target
from orchestray.platform.errors import ConfigError

_SHOWN_CHARACTERS = 300
_UNAUTHORIZED, _FORBIDDEN, _FIRST_ERROR = 401, 403, 400


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


def parse_url(url: str) -> Target:
    """Return the target of a URL, with nothing to send yet.

    Raises:
        ConfigError: the URL is not an http or https URL.
    """
    wanted = "for example http://127.0.0.1:8000 or http://127.0.0.1:8000/predict"
    if "://" not in url:
        raise ConfigError(f"URL: must begin with http:// or https://, got {url!r}; {wanted}")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"URL: {url!r} is no URL: {error}; {wanted}") from None
    if (
        parts.scheme not in {"http", "https"}
        or not parts.hostname
        or not url.isascii()
        or any(c.isspace() for c in url)
    ):
        raise ConfigError(f"URL: must be an http or https URL with a host, got {url!r}; {wanted}")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    tls = parts.scheme == "https"
    return Target(parts.hostname, port or (443 if tls else 80), path, tls=tls)


def exchange(target: Target, *, timeout_s: float, path: str | None = None, method: str | None = None) -> Answer:
    """Send one request: the target's own, or a GET of another path of its server.

    Args:
        target: server, path and request.
        timeout_s: time the server has to answer.
        path: another path; default: the target's.
        method: method for another path; default: GET.

    Raises:
        EndpointError: no answer came; the text gives the reason and a remedy.
    """
    made = target if path is None else replace(target, path=path, method=method or "GET", bodies=())
    headers = dict(made.headers)
    if made.bodies and "content-type" not in {name.lower() for name in headers}:
        headers["Content-Type"] = "application/json"
    context = made.context()
    connection = (
        http.client.HTTPSConnection(made.host, made.port, timeout=timeout_s, context=context)
        if context
        else http.client.HTTPConnection(made.host, made.port, timeout=timeout_s)
    )
    try:
        connection.request(made.method, made.path, body=made.bodies[0] if made.bodies else None, headers=headers)
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
    return f"{where} cannot be reached: {error.strerror or error if isinstance(error, OSError) else error}."


def probe(target: Target, *, timeout_s: float) -> None:
    """Send the request once, and check that the answer is a success.

    Raises:
        EndpointError: it is not; the text quotes the answer.
    """
    answer = exchange(target, timeout_s=timeout_s)
    if answer.status in {_UNAUTHORIZED, _FORBIDDEN}:
        raise EndpointError(
            f"{target.url} answered {answer.status}: it wants a token, or another one. "
            "Give it with --token, or in the environment variable ORCHESTRAY_TOKEN."
        )
    if not answer.ok:
        said = f": {answer.text()}" if answer.body else "."
        hint = (
            "" if answer.status >= 500 else " Another body can be given with --body FILE, another method with --method."
        )
        raise EndpointError(f"{target.url} answered {answer.status} to the request that was to be measured{said}{hint}")
