"""The plan of a measurement: a load, and the server and requests that it is for."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from orchestray.loadtest.loads import Load
from orchestray.platform.errors import ConfigError


@dataclass(frozen=True)
class Target:
    """The server to which requests go, and their content.

    `bodies` are sent in turns; if there are none, requests have no body.
    """

    host: str
    port: int
    path: str
    method: str = "POST"
    tls: bool = False
    verify: bool = True
    """True to check the server's certificate."""
    headers: tuple[tuple[str, str], ...] = ()
    bodies: tuple[bytes, ...] = ()

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://{self.authority}{self.path}"

    @property
    def authority(self) -> str:
        """Host and port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def fields(self) -> list[tuple[str, str]]:
        """Header fields of each request, but for its length."""
        given = {name.lower() for name, _ in self.headers}
        fields = [] if "host" in given else [("Host", self.authority)]
        fields += [("Content-Type", "application/json")] if self.bodies and "content-type" not in given else []
        return [*fields, *self.headers]

    def requests(self) -> list[bytes]:
        """Return the complete requests, as sent."""
        lines = [f"{self.method} {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in self.fields)]
        head = "\r\n".join(lines)
        bodies = self.bodies or ((b"",) if self.method in {"POST", "PUT", "PATCH"} else ())
        if not bodies:
            return [f"{head}\r\n\r\n".encode("latin-1")]
        return [f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode("latin-1") + body for body in bodies]

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS context for https; None for http."""
        if not self.tls:
            return None
        context = ssl.create_default_context()
        if not self.verify:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context


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
    is_plain = url.isascii() and not any(character.isspace() for character in url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or not is_plain:
        raise ConfigError(f"URL: must be an http or https URL with a host, got {url!r}; {wanted}")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    tls = parts.scheme == "https"
    return Target(parts.hostname, port or (443 if tls else 80), path, tls=tls)


@dataclass(frozen=True)
class Plan:
    """A load on a target, and the settings of its measurement."""

    target: Target
    load: Load
    duration_s: float = 10.0
    """Measured seconds, after the warm-up."""
    warm_up_s: float = 1.0
    """Seconds at the start in which requests are sent but not counted."""
    deadline_s: float | None = None
    """Time within which an answer is in time."""
    timeout_s: float = 30.0
    max_connections: int = 1000
    seed: int = 0

    @property
    def end_s(self) -> float:
        return self.warm_up_s + self.duration_s
