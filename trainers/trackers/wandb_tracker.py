"""Weights & Biases as a tracker: into files of the run directory, or online or not at all if WANDB_MODE says so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import wandb

from orchestray.trainers.trackers.base import identity_of


class WandbTracker:
    """A run of W&B, in the project of WANDB_PROJECT, or `orchestray`; `wandb sync` sends one that was made offline."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._run: Any = None

    def start(self, config: dict[str, Any], name: str, resumed: bool) -> int | None:
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "orchestray",
            name=name,
            id=identity_of(self._directory),
            resume="allow",
            config=config,
            dir=str(self._directory),
            mode=mode if (mode := os.environ.get("WANDB_MODE")) in ("online", "disabled") else "offline",
            settings=wandb.Settings(console="off", silent=True),
        )
        return None

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._run.log(metrics, step=step)

    def finish(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "succeeded" else 1)
