"""The addresses of servers, and the parts of a network that each pipeline stage holds. Imports no torch: the driver
uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SERVER_LOST = "server_lost"
"""Answer of a worker when a server is lost and no other has replaced it."""
MEMORY_KEY = "memory"
"""Key in the lead's store under which workers find the place of the parameters that all share."""
COMPLETE_KEY = "complete"
"""Key in the lead's store under which stages that connect to each other learn whether all have come."""


@dataclass(frozen=True)
class Address:
    """The address at which a worker connects to a server."""

    host: str
    port: int
    name: str
    """Name of this meeting; it ends with a number, and later meetings have larger ones."""

    @property
    def number(self) -> int:
        """Number at the end of the name."""
        return int(self.name.rpartition("-")[2])


@dataclass(frozen=True)
class StagePlan:
    """The cut of the network into stages, and the tensors that each worker of a replica holds.

    A worker's servers know from it which parameters are theirs.
    """

    bounds: tuple[tuple[int, int], ...]
    """Layers of each stage, from and up to; a worker may have several stages. Empty without a pipeline."""
    parameters: tuple[tuple[str, ...], ...]
    """Names of the parameters that each worker has servers for, in its order. Of a parameter that several workers of a
    tensor group hold alike, only one of them has servers.
    """
    buffers: tuple[tuple[str, ...], ...]
    """Names of each worker's buffers, in its order."""
    ranges: tuple[Mapping[str, tuple[tuple[tuple[int, int], ...], ...]], ...] = ()
    """Part of the plain model's tensor that each worker holds, by name (`Piece.ranges`); a name that is not listed: all
    of it.
    """

    def ranges_of(self, worker: int) -> Mapping[str, tuple[tuple[tuple[int, int], ...], ...]]:
        """Return the ranges of one worker of a replica."""
        return self.ranges[worker] if self.ranges else {}

    @property
    def num_workers(self) -> int:
        """Number of workers of a replica."""
        return len(self.parameters)
