"""How a worker finds a server, and who holds what of a network in stages. Imports no torch: the driver uses it."""

from __future__ import annotations

from collections.abc import Mapping
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
    """Layers of each stage, from and up to; a worker may have several stages. Empty where there is no pipeline."""
    parameters: tuple[tuple[str, ...], ...]
    """Of each worker the names of what it has servers for, in its order: of what workers of its tensor group hold alike
    only one of them has."""
    buffers: tuple[tuple[str, ...], ...]
    """Of each worker the names of its buffers, in its order."""
    ranges: tuple[Mapping[str, tuple[tuple[tuple[int, int], ...], ...]], ...] = ()
    """Of each worker, by name, which part of the plain model's tensor it holds (`Piece.ranges`); not listed: all."""

    def ranges_of(self, worker: int) -> Mapping[str, tuple[tuple[tuple[int, int], ...], ...]]:
        """Those of one worker of a replica."""
        return self.ranges[worker] if self.ranges else {}

    @property
    def num_workers(self) -> int:
        """Of a replica."""
        return len(self.parameters)
