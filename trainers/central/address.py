"""How a worker finds a server. Imports no torch: the driver uses it."""

from __future__ import annotations

from dataclasses import dataclass

SERVER_LOST = "server_lost"
"""What a worker answers when a server is gone and nobody has taken its place."""
MEMORY_KEY = "memory"
"""Under which the lead tells, in the store where workers meet it, where the parameters that all share are."""


@dataclass(frozen=True)
class Address:
    """Where a worker meets a server."""

    host: str
    port: int
    name: str
    """Of this meeting."""
