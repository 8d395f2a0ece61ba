"""Trackio as a tracker: into its database on this machine, which `trackio show` shows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import trackio


class TrackioTracker:
    """A run of Trackio, in the project of TRACKIO_PROJECT, or `orchestray`."""

    def __init__(self, _directory: Path) -> None:
        self._run: Any = None

    def start(self, config: dict[str, Any], name: str, resumed: bool) -> int | None:
        project = os.environ.get("TRACKIO_PROJECT") or "orchestray"
        self._run = trackio.init(project=project, name=name, config=config, resume="allow" if resumed else "never")
        return None

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._run.log(metrics, step=step)

    def finish(self, status: str) -> None:
        self._run.finish()
