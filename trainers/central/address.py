"""How a worker finds a server, and who holds what of a network in stages. Imports no torch: the driver uses it."""

from __future__ import annotations

from dataclasses import dataclass

SERVER_LOST = "server_lost"
"""What a worker answers when a server is gone and nobody has taken its place."""
PEER_LOST = "peer_lost"
"""What a stage answers when another stage of its replica is gone."""
MEMORY_KEY = "memory"
"""Under which the lead tells, in the store where workers meet it, where the parameters that all share are."""
COMPLETE_KEY = "complete"
"""Under which stages that meet, in the lead's store, learn whether all have come."""


@dataclass(frozen=True)
class Address:
    """Where a worker meets a server."""

    host: str
    port: int
    name: str
    """Of this meeting; it ends with a number, and later meetings have larger ones."""

    @property
    def number(self) -> int:
        """At the end of the name."""
        return int(self.name.rpartition("-")[2])


@dataclass(frozen=True)
class StagePlan:
    """Where the network is cut, and what each worker of a replica holds of it: so its servers know what is theirs."""

    bounds: tuple[tuple[int, int], ...]
    """Layers of each stage, from and up to; a worker may have several stages."""
    parameters: tuple[tuple[str, ...], ...]
    """Of each worker the names of what it trains, in its order."""
    buffers: tuple[tuple[str, ...], ...]
    """Of each worker the names of its buffers, in its order."""

    @property
    def num_workers(self) -> int:
        """Of a replica."""
        return len(self.parameters)
