"""What keeps a load generator from measuring."""

from __future__ import annotations

from orchestray.platform.errors import OrchestrayError


class EndpointError(OrchestrayError):
    """The endpoint does not answer, refuses the request, or does not say what it wants."""
