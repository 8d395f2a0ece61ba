"""Hosts for tests of deaths at bad moments: each kills its process once in a run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from orchestray.trainers.loop.host import ReplicaHost
from orchestray.trainers.ps.hosts.server_host import ServerHost


class ReplicaKilledBeforeTheRun(ReplicaHost):
    """A replica that dies when it is first asked how much there is to do."""

    def describe(self) -> dict[str, int]:
        _die_once(self._settings.model_directory)
        return super().describe()


class ServerKilledBeforeTheRun(ServerHost):
    """A server that dies when it is first asked how much there is to do."""

    def describe(self) -> dict[str, int]:
        _die_once(self._settings.model_directory)
        return super().describe()


def _die_once(model_directory: str | None) -> None:
    assert model_directory is not None
    died = Path(model_directory).parent / "died"
    if not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
