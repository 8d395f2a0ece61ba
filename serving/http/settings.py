"""What the HTTP side can be told."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestray.platform.errors import ConfigError
from orchestray.serving.http.auth import Tokens


@dataclass(frozen=True)
class HttpSettings:
    """How requests are received.

    Raises:
        ConfigError: a limit that lets nothing through.
    """

    max_body_bytes: int = 16 * 2**20
    """A larger body is refused before it is parsed (413)."""
    max_json_depth: int = 64
    """Lists and objects within each other, at most (422)."""
    tokens: Tokens = field(default_factory=Tokens)
    """Who may ask; none: everybody."""
    rate_limit_per_s: float | None = None
    """Requests a second of one token, over time; one with a limit of its own in the tokens' file has that."""
    num_fronts: int = 1
    """Processes that take the endpoint's requests: each lets its part of a token's rate through."""
    timeout_s: float | None = None
    """Seconds from its arrival to the deadline of a request that names none; None: it has none."""
    access_log: bool = True
    """A line of JSON a request, to the logger `orchestray.serving.access`."""
    tracing: bool = False
    """OpenTelemetry spans, exported as the application has set up, else as the `OTEL_*` variables say."""

    def __post_init__(self) -> None:
        limits = {
            "max_body_bytes": self.max_body_bytes,
            "max_json_depth": self.max_json_depth,
            "rate_limit_per_s": self.rate_limit_per_s,
            "num_fronts": self.num_fronts,
            "timeout_s": self.timeout_s,
        }
        problems = [
            f"{name}: must be > 0, got {limit}" for name, limit in limits.items() if not (limit is None or limit > 0)
        ]
        if problems:
            raise ConfigError(problems)
