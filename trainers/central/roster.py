"""Which processes a run has: `actors.json`, and an event for each that is new. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestray.platform.gang.gang import Gang
    from orchestray.platform.run.writer import RunWriter


class Roster:
    """The processes of some gangs, in the order of the gangs."""

    def __init__(self, writer: RunWriter, gangs: Sequence[Gang]) -> None:
        self._writer = writer
        self._gangs = gangs
        self._written: list[dict[str, Any]] = []
        self._announced = False

    def write(self) -> None:
        """Keep `actors.json` current, and say of each new process that it is there."""
        actors: list[dict[str, Any]] = [
            {"role": role, "rank": rank, "pid": identity.pid, "node": identity.node}
            for gang in self._gangs
            for role, rank, identity in gang.identify()
        ]
        if actors == self._written:
            return
        before, self._written = self._written, actors
        self._writer.actors(actors)
        if self._announced:
            self._tell([actor for actor in actors if actor not in before])

    def announce(self) -> None:
        """The run has begun: say of all processes that they are there, and from now on of new ones."""
        self._announced = True
        self._tell(self._written)

    def _tell(self, actors: Sequence[dict[str, Any]]) -> None:
        for actor in actors:
            self._writer.event("worker_started", **actor)
