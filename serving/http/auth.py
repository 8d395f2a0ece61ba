"""Bearer tokens (RFC 6750) and their rate limits: only their SHA-256 is kept, and compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestray.platform.errors import ConfigError
from orchestray.serving.http.problems import HttpProblem, unavailable

ENVIRONMENT_VARIABLE = "ORCHESTRAY_TOKEN"
_LINE = re.compile(r"(?P<digest>[0-9a-fA-F]{64})(?:\s+(?P<name>[\w.@-]{1,64}))?(?:\s+rate=(?P<rate>\d+(?:\.\d+)?))?")
_LINE_WANTED = "the SHA-256 of a token (64 hexadecimal digits), then perhaps a name, then perhaps rate=<requests/s>"


@dataclass(frozen=True)
class Token:
    """A token that admits requests."""

    digest: str
    """SHA-256 of the token, in hexadecimal."""
    name: str
    """Name of the token in logs."""
    rate_limit_per_s: float | None = None


@dataclass(frozen=True)
class Tokens:
    """The tokens that admit requests; without any, every request is admitted."""

    tokens: tuple[Token, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.tokens)

    @classmethod
    def load(cls, tokens_file: Path | None = None, environment: Mapping[str, str] | None = None) -> Tokens:
        """Load the tokens of a file, and the one in the environment variable ORCHESTRAY_TOKEN.

        Args:
            tokens_file: lines of `<sha256> [name] [rate=<requests/s>]`; empty lines and those that begin with # are
                skipped. `printf %s TOKEN | sha256sum` makes a hash.
            environment: environment variables; default: those of this process.

        Raises:
            ConfigError: the file cannot be read, has no token, or has malformed lines.
        """
        environment = os.environ if environment is None else environment
        tokens = [] if tokens_file is None else _read(tokens_file)
        if ENVIRONMENT_VARIABLE in environment:
            given = environment[ENVIRONMENT_VARIABLE].strip()
            if not given:
                raise ConfigError(f"{ENVIRONMENT_VARIABLE}: is set, but empty: unset it, or put a token in it")
            tokens.append(Token(digest_of(given.encode()), "environment"))
        return cls(tuple(tokens))

    def check(self, authorization: bytes | None) -> Token | None:
        """Return the token of a request; None if tokens are not required.

        Raises:
            HttpProblem: 401.
        """
        if not self.tokens:
            return None
        if authorization is None:
            raise _unauthorized("Send a token: Authorization: Bearer <token>.", 'Bearer realm="orchestray"')
        scheme, _, given = authorization.strip().partition(b" ")
        digest, found = digest_of(given.strip()), None
        for token in self.tokens:
            if hmac.compare_digest(digest, token.digest):
                found = token
        if found is None or scheme.lower() != b"bearer":
            raise _unauthorized("The token is not valid.", 'Bearer realm="orchestray", error="invalid_token"')
        return found


def digest_of(token: bytes) -> str:
    """Return the SHA-256 of a token, in hexadecimal."""
    return hashlib.sha256(token).hexdigest()


def _read(tokens_file: Path) -> list[Token]:
    try:
        lines = tokens_file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"auth.tokens_file: {tokens_file} cannot be read: {why}") from None
    tokens, problems = [], []
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            # The line itself is not shown: it may be a token that was not hashed.
            problems.append(f"auth.tokens_file: {tokens_file}:{number}: wanted {_LINE_WANTED}")
        elif match["rate"] is not None and float(match["rate"]) == 0.0:
            problems.append(
                f"auth.tokens_file: {tokens_file}:{number}: rate: must be > 0; without it nothing is limited"
            )
        else:
            rate = match["rate"]
            name = match["name"] or f"line-{number}"
            tokens.append(Token(match["digest"].lower(), name, float(rate) if rate else None))
    if not problems and not tokens:
        problems.append(f"auth.tokens_file: {tokens_file} has no token: wanted lines of {_LINE_WANTED}")
    if problems:
        raise ConfigError(problems)
    return tokens


def _unauthorized(text: str, challenge: str) -> HttpProblem:
    return HttpProblem(401, text, headers={"www-authenticate": challenge})


class RateLimits:
    """A token bucket per token, filled at its rate, with room for what one second brings.

    Args:
        per_s: rate for tokens without one of their own; None: no limit.
    """

    def __init__(self, per_s: float | None) -> None:
        self._per_s = per_s
        self._buckets: dict[str, tuple[float, float]] = {}

    def take(self, token: Token, now_s: float) -> None:
        """Count a request.

        Raises:
            HttpProblem: 429, with the time until the next is allowed.
        """
        per_s = token.rate_limit_per_s or self._per_s
        if per_s is None:
            return
        most = max(1.0, per_s)
        left, before_s = self._buckets.get(token.digest, (most, now_s))
        left = min(most, left + (now_s - before_s) * per_s)
        if left < 1.0:
            self._buckets[token.digest] = (left, now_s)
            raise unavailable(
                f"More than the {per_s:g} requests a second that this token is allowed.", (1.0 - left) / per_s, 429
            )
        self._buckets[token.digest] = (left - 1.0, now_s)
