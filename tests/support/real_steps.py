"""Steps of real workers, as threads, and the bytes that they send."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.thread_group import run_members
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.core.outcome import Outcome
from orchestray.trainers.loop.host import ReplicaHost


class Host(ReplicaHost):
    def run(self, world: Collective) -> Outcome:
        self._replica.connect(world)
        return self._replica.run(time.time())


def settings_of(strategy: dict[str, Any], task: Any = None, **train: Any) -> ReplicaSettings:
    """Return the settings of a run of 10,000 steps on digits that keeps nothing."""
    config = load_train_config(
        {
            "task": task or {"type": "digits", "hidden": [32, 32]},
            "train": {"batch_size": 48, "steps": 10_000, "optimizer": {"type": "adam", "lr": 0.01}, **train},
            "strategy": strategy,
        }
    )
    settings = ReplicaSettings.from_config(config, storage="", model_directory="")
    return replace(settings, checkpoint_storage=None, model_directory=None)


def bytes_a_step(settings: ReplicaSettings, num_steps: int) -> float:
    """Return the bytes of a step of real workers: the difference of two runs, as begin and end send as well."""
    sent = []
    for steps in (num_steps, 2 * num_steps):
        real = replace(settings, pause_at=steps, validate_every_steps=10_000)
        # Building draws from the process-wide generator: one after the other.
        hosts = [Host(real) for _ in range(settings.layout.size)]
        sent.append(run_members(len(hosts), lambda world, hosts=hosts: hosts[world.rank].run(world))[0].bytes_sent)
    return (sent[1] - sent[0]) / num_steps
