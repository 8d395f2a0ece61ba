"""Settings of the HTTP side."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import TypeAdapter

from orchestray.platform.errors import ConfigError
from orchestray.serving.http.auth import Tokens


@dataclass(frozen=True)
class HttpSettings:
    """Settings for the reception of requests.

    Raises:
        ConfigError: a limit admits nothing.
    """

    max_body_bytes: int = 16 * 2**20
    """Largest body; a larger one is refused before it is parsed (413)."""
    tokens: Tokens = field(default_factory=Tokens)
    """Tokens that admit requests; empty: all requests are admitted."""
    rate_limit_per_s: float | None = None
    """Requests a second per token, on average; a rate of its own in the tokens' file takes precedence."""
    timeout_s: float | None = None
    """Seconds from arrival to the deadline of a request that sets none; None: no deadline."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may ask from a browser; `*`: any."""
    root_path: str = ""
    """Prefix under which a proxy shows the endpoint; empty: as `X-Forwarded-Prefix` or the server says."""
    access_log: bool = True
    """True for a line of JSON per request, to the logger `orchestray.serving.access`."""
    tracing: bool = False
    """True for OpenTelemetry spans, exported as the application has set up, else as the `OTEL_*` variables say."""

    def __post_init__(self) -> None:
        limits = {
            "max_body_bytes": self.max_body_bytes,
            "rate_limit_per_s": self.rate_limit_per_s,
            "timeout_s": self.timeout_s,
        }
        problems = [
            f"{name}: must be > 0, got {limit}" for name, limit in limits.items() if not (limit is None or limit > 0)
        ]
        if problems:
            raise ConfigError(problems)


JSON = TypeAdapter(HttpSettings)
"""Writes settings as JSON and reads them; the tokens are hashes."""
