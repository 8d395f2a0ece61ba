"""With what workers agree by, the planned bytes of a step are those of real workers, to the byte."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.thread_group import run_members
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.core.outcome import Outcome
from orchestray.trainers.loop.host import ReplicaHost
from orchestray.trainers.planning.agreements import agreed_bytes
from orchestray.trainers.planning.dry_run import dry_run, profile
from orchestray.trainers.planning.pipelines import pipeline_step
from orchestray.trainers.planning.pricing import sent_bytes
from orchestray.trainers.planning.run_length import RunLength

EPOCH = 29
"""Steps of an epoch of `settings_of`: agreements come after 16 of them, and at its end."""
DIVERGING: dict[str, dict[str, Any]] = {
    "averaged": {"network": {"data": 2}, "exchange": {"type": "averaging", "every": 4}},
    "elastic": {"network": {"data": 2}, "exchange": {"type": "elastic_averaging", "every": 2}},
    "three that gossip": {"network": {"data": 3}, "exchange": {"type": "gossip"}},
}


class Host(ReplicaHost):
    def run(self, world: Collective) -> Outcome:
        self._replica.connect(world)
        return self._replica.run(time.time())


def settings_of(strategy: dict[str, Any]) -> ReplicaSettings:
    config = load_train_config(
        {
            "task": {"type": "digits", "hidden": [32, 32]},
            "train": {"batch_size": 48, "drop_last": True, "steps": 10_000, "optimizer": {"type": "sgd", "lr": 0.01}},
            "strategy": strategy,
        }
    )
    settings = ReplicaSettings.from_config(config, storage="", model_directory="")
    return replace(settings, checkpoint_storage=None, model_directory=None, validate_every_steps=10_000)


def bytes_a_step(settings: ReplicaSettings, num_steps: int) -> float:
    """Return the bytes of a step of real workers: the difference of two runs, as a run's begin and end send as well."""
    sent = []
    for steps in (num_steps, 2 * num_steps):
        real = replace(settings, pause_at=steps)
        hosts = [Host(real) for _ in range(settings.layout.size)]
        sent.append(run_members(len(hosts), lambda world, hosts=hosts: hosts[world.rank].run(world))[0].bytes_sent)
    return (sent[1] - sent[0]) / num_steps


@pytest.mark.parametrize("name", DIVERGING)
def test_diverging_workers_agree_after_several_steps_and_at_the_end_of_an_epoch(name: str) -> None:
    settings = settings_of(DIVERGING[name])
    planned = sent_bytes(dry_run(settings), settings.layout, agreed_bytes(settings, RunLength(0, EPOCH, 48)))
    assert sum(planned.values()) == pytest.approx(bytes_a_step(settings, 4 * EPOCH), abs=1.0)


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble", "interleaved_1f1b", "zbv", "dual_pipe_v", "pipedream"])
def test_a_pipeline_sends_what_crosses_to_another_worker_and_agrees(schedule: str) -> None:
    settings = settings_of(
        {"network": {"pipeline": 2, "microbatches": 4, "schedule": schedule, "split": "equal"}}  # as times differ
    )
    link_bytes = pipeline_step([profile(settings)], settings, lambda _: 0.0).link_bytes
    planned = link_bytes + agreed_bytes(settings, RunLength(0, EPOCH, 48))
    assert planned == pytest.approx(bytes_a_step(settings, EPOCH), abs=0.1)
