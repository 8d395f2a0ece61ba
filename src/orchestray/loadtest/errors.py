"""Errors that keep a load generator from measuring."""

from __future__ import annotations

from orchestray.platform.errors import OrchestrayError


class EndpointError(OrchestrayError):
    """Raised when the endpoint does not answer, refuses the request, or does not describe what it expects."""


NOT_STARTED, STDIN_ENDED, STDOUT_ENDED = 3, 4, 5
ENDINGS = {
    NOT_STARTED: "it was not told when to begin",
    STDIN_ENDED: "its stdin was closed before the load was over",
    STDOUT_ENDED: "nobody reads its stdout any more",
}
"""Reasons why a process of the load generator ends early, by its exit status."""
