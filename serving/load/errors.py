"""What keeps a load generator from measuring."""

from __future__ import annotations

from orchestray.platform.errors import OrchestrayError


class EndpointError(OrchestrayError):
    """The endpoint does not answer, refuses the request, or does not say what it wants."""


NOT_TOLD, STDIN_ENDED, STDOUT_ENDED = 3, 4, 5
ENDINGS = {
    NOT_TOLD: "it was not told when to begin",
    STDIN_ENDED: "its stdin was closed before the load was over",
    STDOUT_ENDED: "nobody reads its stdout any more",
}
"""Why a process of the load generator ends early, by its exit status."""
