"""With what workers agree by, the planned bytes of a step are those of real workers, to the byte."""

from __future__ import annotations

from typing import Any

import pytest

from orchestray.trainers.planning.agreements import agreed_bytes
from orchestray.trainers.planning.dry_run import dry_run, profile
from orchestray.trainers.planning.pipelines import pipeline_step
from orchestray.trainers.planning.pricing import sent_bytes
from orchestray.trainers.planning.run_length import RunLength
from support.real_steps import bytes_a_step, settings_of

pytestmark = pytest.mark.usefixtures("_few_measured_steps")
BATCH = 72
TASK = {"type": "digits", "hidden": [32, 32], "validation_fraction": 0.19}
EPOCH = 20
"""Steps of an epoch of these settings: agreements come after 16 of them, and at its end."""
DIVERGING: dict[str, dict[str, Any]] = {
    "averaged": {"network": {"data": 2}, "exchange": {"type": "averaging", "every": 4}},
    "elastic": {"network": {"data": 2}, "exchange": {"type": "elastic_averaging", "every": 2}},
    "three that gossip": {"network": {"data": 3}, "exchange": {"type": "gossip"}},
}


@pytest.mark.parametrize("name", DIVERGING)
def test_diverging_workers_agree_after_several_steps_and_at_the_end_of_an_epoch(name: str) -> None:
    settings = settings_of(DIVERGING[name], TASK, batch_size=BATCH, drop_last=True)
    planned = sent_bytes(dry_run(settings), settings.layout, agreed_bytes(settings, RunLength(0, EPOCH, BATCH)))
    assert sum(planned.values()) == pytest.approx(bytes_a_step(settings, EPOCH), abs=1.0)


@pytest.mark.parametrize(
    ("schedule", "num_workers"),
    [
        *(
            (schedule, 2)
            for schedule in ("gpipe", "zero_bubble", "interleaved_1f1b", "zbv", "dual_pipe_v", "pipedream")
        ),
        ("gpipe", 3),  # among which values do not divide
    ],
)
def test_a_pipeline_sends_what_crosses_to_another_worker_and_agrees(schedule: str, num_workers: int) -> None:
    network = {"pipeline": num_workers, "microbatches": 4, "schedule": schedule, "split": "equal"}  # as times differ
    settings = settings_of({"network": network}, TASK, batch_size=BATCH, drop_last=True)
    link_bytes = pipeline_step([profile(settings)], settings, lambda _: 0.0).link_bytes
    planned = link_bytes + agreed_bytes(settings, RunLength(0, EPOCH, BATCH))
    assert planned == pytest.approx(bytes_a_step(settings, EPOCH if settings.is_streaming else 2), abs=0.1)
