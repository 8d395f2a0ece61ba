"""The list of a run's processes: `actors.json`, and an event for each new one. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestray.platform.actors.gang import Gang
    from orchestray.platform.actors.member import Identity
    from orchestray.trainers.driver.runlog.run_log import RunLog


class ActorsFile:
    """A list of the processes of some gangs, in the order of the gangs, and the log of what they print."""

    def __init__(self, run_log: RunLog, gangs: Sequence[Gang]) -> None:
        self._writer, self._output = run_log.writer, run_log.output
        self._gangs = gangs
        self._output.skip(self._processes())
        self._written: list[dict[str, Any]] = []
        self._announced = False

    def write(self) -> None:
        """Keep `actors.json` current, record an event for each new process, and take in what all have printed."""
        processes = self._processes()
        self._output.take(processes)
        actors: list[dict[str, Any]] = [
            {"role": role, "rank": rank, "pid": identity.pid, "node": identity.node}
            for role, rank, identity in processes
        ]
        if actors == self._written:
            return
        before, self._written = self._written, actors
        self._writer.actors(actors)
        if self._announced:
            self._tell([actor for actor in actors if actor not in before])

    def _processes(self) -> list[tuple[str, int, Identity]]:
        return [process for gang in self._gangs for process in gang.identify()]

    def announce(self) -> None:
        """Record an event for all processes, because the run has begun, and from now on for new ones."""
        self._announced = True
        self._tell(self._written)

    def _tell(self, actors: Sequence[dict[str, Any]]) -> None:
        for actor in actors:
            self._writer.event("worker_started", **actor)
