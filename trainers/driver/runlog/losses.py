"""A driver's record of lost and replaced processes: events, display, and the count of recoveries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestray.trainers.driver.runlog.kill_schedule import described

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestray.trainers.driver.runlog.kill_schedule import KillSchedule
    from orchestray.trainers.driver.runlog.run_log import RunLog


class Losses:
    """A record of the processes that a run has lost."""

    def __init__(self, run_log: RunLog, kills: KillSchedule, role: str) -> None:
        """
        Args:
            run_log: log of the run.
            kills: kills on purpose of the workers.
            role: role of the workers.
        """
        self._writer, self._progress, self._run_progress = run_log.writer, run_log.progress, run_log.run_progress
        self._kills, self._role, self._output = kills, role, run_log.output
        self._stacks: dict[tuple[str, int], str] = {}
        """Files with the stacks of processes that hung, by role and rank, until their loss is recorded."""

    def begin(self) -> None:
        """Note that a process is lost, from which time the recovery is measured."""
        progress = self._run_progress
        progress.lost_at_s = progress.lost_at_s or progress.now_s()

    def keep_stacks(self, role: str, rank: int, text: str) -> None:
        """Write the stacks of a process that hangs; its loss, which is recorded next, names their file."""
        self._stacks[role, rank] = self._writer.stacks(role, rank, text)

    def stalled(self, role: str) -> None:
        """Record that all processes of a role wait for each other, with no end."""
        files = [self._stacks.pop(key) for key in sorted(self._stacks) if key[0] == role]
        self._writer.event("stalled", role=role, stacks=files)
        self._progress.event(f"all of role {role} wait for each other, and begin again ({', '.join(files)})")

    def record(self, role: str, causes: Mapping[int, str]) -> None:
        """Record losses, and the kills on purpose among them.

        Args:
            role: role of the processes.
            causes: cause of each loss, by rank.
        """
        self._output.take(())  # before it is said that they are lost: it may say why
        for rank, cause in sorted(causes.items()):
            file = self._stacks.pop((role, rank), None)
            self._writer.event("worker_lost", role=role, rank=rank, cause=cause, **({"stacks": file} if file else {}))
            self._progress.event(f"{role.replace('_', ' ')} {rank} lost: {cause}" + (f" ({file})" if file else ""))
        for kill in self._kills.lost(sorted(causes)) if role == self._role else ():
            self._writer.event("fault", **described(kill))

    def replaced(self, role: str, rank: int, *, spare: bool = False) -> None:
        """Record that another process has a lost one's rank."""
        self._writer.event("worker_replaced", role=role, rank=rank, spare=spare)

    def show(self, num_recoveries: int) -> None:
        """Show the number of recoveries so far."""
        if self._run_progress.restarts != num_recoveries:
            self._run_progress.restarts = num_recoveries
            self._progress.set_restarts(num_recoveries)
