"""The scaling of a live run, for both drivers: requests become events, and decisions become processes and answers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import OrchestrayError
from orchestray.trainers.driver.control import events
from orchestray.trainers.driver.runlog.scale_requests import RefusedError

if TYPE_CHECKING:
    from orchestray.platform.actors.gang import Gang
    from orchestray.platform.actors.scale_up import Growth
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.driver.runlog.run_log import RunLog
    from orchestray.trainers.driver.runlog.scale_requests import ScaleRequests


class Scaling:
    """The scaling of a gang of workers, for as long as the gang exists."""

    def __init__(self, run_log: RunLog, gang: Gang, host: str, settings: ReplicaSettings) -> None:
        """
        Args:
            run_log: log of the run.
            gang: gang of the workers.
            host: import path of the host that its members build.
            settings: settings of the run at its start.
        """
        self._run_log = run_log
        self._gang = gang
        self._host = host
        self._settings = settings
        self._starts = False
        """True while processes are being started for a change."""

    def news(self) -> list[events.Event]:
        """Return what has happened: a change was requested, or its processes are there. Never waits."""
        requests = self._run_log.scale_requests
        if requests is None:
            return []
        if requests.change is None:
            change = requests.look()
            return [] if change is None else [events.ScaleWanted(change.after * self._settings.layout.model_size)]
        if self._starts:
            return self._look_at(self._gang.membership.growth)
        return []

    def grow(self) -> list[events.Event]:
        """Start the processes that a change adds; return that it is refused if they cannot be placed."""
        change = self._requests.change
        assert change is not None
        number = (change.after - change.before) * self._settings.layout.model_size
        settings = scaled(self._settings, change.after)
        try:
            self._gang.membership.begin_growth(number, self._host, settings)
        except OrchestrayError as error:
            return [_refused(error)]
        self._starts = True
        return []

    def resize(self) -> int:
        """Take on the started workers, or end the last ones; return the number of replicas from now on."""
        change = self._requests.change
        assert change is not None
        self._starts = False
        if change.grows:
            self._gang.membership.adopt()
        else:
            self._gang.membership.shrink(change.after * self._settings.layout.model_size)
        return change.after

    def refuse(self, reason: str) -> None:
        """Refuse the change, with a reason for the user."""
        self._starts = False
        if self._gang.membership.growth is not None:
            self._gang.membership.growth.cancel()
        self._requests.refuse(RefusedError(reason))

    def done(self, step: int) -> None:
        """Record the change, which was made after `step`."""
        change = self._requests.done(step)
        values: dict[str, Any] = {"from": change.before, "to": change.after, "step": step}
        self._run_log.writer.event("scaled", **values)
        self._run_log.progress.event(f"scaled at step {step}: data: {change.before} -> {change.after}")

    def close(self) -> None:
        """Cancel a growth, because the run has ended; `ScaleRequests.close` answers open requests."""
        if self._gang.membership.growth is not None:
            self._gang.membership.growth.cancel()

    @property
    def _requests(self) -> ScaleRequests:
        assert self._run_log.scale_requests is not None
        return self._run_log.scale_requests

    def _look_at(self, growth: Growth | None) -> list[events.Event]:
        assert growth is not None
        try:
            if not growth.is_ready():
                return []
        except OrchestrayError as error:
            return [_refused(error)]
        self._starts = False
        return [events.Grown()]


def _refused(error: OrchestrayError) -> events.Event:
    return events.NotGrown(f"{error} The run goes on as it was.")


def scaled(settings: ReplicaSettings, num_replicas: int) -> ReplicaSettings:
    """Return the settings of the replicas once there are `num_replicas`."""
    return replace(settings, layout=replace(settings.layout, data=num_replicas))
