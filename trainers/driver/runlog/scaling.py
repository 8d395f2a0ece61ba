"""The scaling of a live run, for both drivers: takes requests, prepares added members, and reports the result."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import OrchestrayError
from orchestray.trainers.driver.runlog.scale_requests import RefusedError

if TYPE_CHECKING:
    import threading

    from orchestray.platform.actors.gang import Gang
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.driver.runlog.run_log import RunLog
    from orchestray.trainers.driver.runlog.scale_requests import Change


class Scaling:
    """The scaling of a gang of workers, for as long as the gang exists."""

    def __init__(self, run_log: RunLog, gang: Gang, host: str, stop: threading.Event) -> None:
        """
        Args:
            run_log: log of the run.
            gang: gang of the workers.
            host: import path of the host that its members build.
            stop: set when the run is to end.
        """
        self._run_log = run_log
        self._gang = gang
        self._host = host
        self._stop = stop

    def ready(self, settings: ReplicaSettings) -> Change | None:
        """Return the change to make now; None if none was requested, or the added members are not built yet. Never
        waits.

        Args:
            settings: present settings of the run.
        """
        scale_requests = self._run_log.scale_requests
        change = None if scale_requests is None else scale_requests.look()
        if change is None:
            return None
        if self._stop.is_set():
            self.refuse("The run is being stopped.")
            return None
        if not change.grows:
            return change
        gang = self._gang
        try:
            if gang.growth is None:
                num_members = (change.after - change.before) * settings.layout.model_size
                gang.begin_growth(num_members, self._host, scaled(settings, change))
            return change if gang.growth is not None and gang.growth.is_ready() else None
        except OrchestrayError as error:
            self.refuse(f"{error} The run goes on as it was.")
            return None

    def refuse(self, reason: str) -> None:
        """Refuse the change, with a reason for the user."""
        if self._gang.growth is not None:
            self._gang.growth.cancel()
        if self._run_log.scale_requests is not None:
            self._run_log.scale_requests.refuse(RefusedError(reason))

    def done(self, step: int) -> None:
        """Record the change, which was made after `step`."""
        assert self._run_log.scale_requests is not None
        change = self._run_log.scale_requests.done(step)
        values: dict[str, Any] = {"from": change.before, "to": change.after, "step": step}
        self._run_log.writer.event("scaled", **values)
        self._run_log.progress.event(f"scaled at step {step}: data: {change.before} -> {change.after}")

    def close(self) -> None:
        """Cancel a growth, because the run has ended; `ScaleRequests.close` answers open requests."""
        if self._gang.growth is not None:
            self._gang.growth.cancel()


def scaled(settings: ReplicaSettings, change: Change) -> ReplicaSettings:
    """Return the settings of the replicas after the change."""
    return replace(settings, layout=replace(settings.layout, data=change.after))
