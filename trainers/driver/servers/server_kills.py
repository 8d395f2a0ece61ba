"""The kills of servers among a run's faults; a worker does its own (`trainers.core.faults`). Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray

from orchestray.platform.actors.slot import waiting
from orchestray.trainers.driver.runlog.kill_schedule import described

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from orchestray.platform.actors.gang import Gang
    from orchestray.trainers.driver.runlog.run_log import RunLog

_END_TIMEOUT_S = 120.0


class ServerKills:
    """The kills of servers and leaf servers that are still to happen."""

    def __init__(self, faults: Iterable[Mapping[str, Any]], gangs: Sequence[Gang], run_log: RunLog) -> None:
        """
        Args:
            faults: all faults of the run.
            gangs: gangs of the servers and of the leaf servers.
            run_log: log of the run.
        """
        self._gangs = {gang.shape.role: gang for gang in gangs}
        self._due = [fault for fault in faults if fault["kind"] == "kill" and fault["role"] in self._gangs]
        self._writer, self._run_progress = run_log.writer, run_log.run_progress

    def __len__(self) -> int:
        return len(self._due)

    def do_next(self) -> None:
        """Do the first kill that is due at the run's last step, if there is one; return when its process has ended."""
        for fault in self._due:
            if self._run_progress.last_step >= fault["at_step"]:
                self._due.remove(fault)
                self._writer.event("fault", **described(fault))
                slot = self._gangs[fault["role"]].slots[fault["rank"]]
                end = slot.end or waiting(slot).end
                ray.kill(slot.actor)
                ray.wait([end], timeout=_END_TIMEOUT_S)  # it must not answer requests after this
                return
