"""What members of a gang host in tests of deaths at bad moments: each kills its process once in a run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from orchestray.trainers.central.server_host import ServerHost
from orchestray.trainers.replica.host import ReplicaHost


class ReplicaKilledBeforeTheRun(ReplicaHost):
    """When it is first asked how much there is to do."""

    def describe(self) -> dict[str, int]:
        _die_once(self._settings.model_directory)
        return super().describe()


class ServerKilledBeforeTheRun(ServerHost):
    """As `ReplicaKilledBeforeTheRun`."""

    def describe(self) -> dict[str, int]:
        _die_once(self._settings.model_directory)
        return super().describe()


def _die_once(model_directory: str | None) -> None:
    assert model_directory is not None
    died = Path(model_directory).parent / "died"
    if not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
