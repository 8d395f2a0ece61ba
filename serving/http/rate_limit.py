"""Rate limits of tokens."""

from __future__ import annotations

from orchestray.serving.http.auth import Token
from orchestray.serving.http.problems import unavailable


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
