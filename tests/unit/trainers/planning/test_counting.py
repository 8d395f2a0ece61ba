"""Counts of pipelines among other splits are of the bytes that real workers hold and send."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestray.platform.comm.thread_group import run_members
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.planning.agreements import agreed_bytes
from orchestray.trainers.planning.counting import count, countable
from orchestray.trainers.planning.dry_run import WatchedHost, dry_run, held_bytes, profile
from orchestray.trainers.planning.pipelines import pipeline_step
from orchestray.trainers.planning.predict import _held_bytes, _whole
from orchestray.trainers.planning.run_length import RunLength
from support.real_steps import Host, bytes_a_step, settings_of

pytestmark = pytest.mark.usefixtures("_few_measured_steps")
BATCH = 192
EPOCH = 7
"""Steps of an epoch of these settings, which drop its last batch."""
CNN = {"type": "digits", "model": "cnn", "hidden": [4, 8]}
SHARD = {"type": "allreduce", "shard": "gradients"}
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "replicas": (None, {"data": 2}, {}),
    "three replicas": (None, {"data": 3}, {}),
    "statistics over the replicas": (CNN, {"data": 2, "microbatches": 8}, {}),
    "statistics asked for again for the weights": (CNN, {"data": 2, "schedule": "zbv"}, {}),
    "statistics of each replica": (CNN, {"data": 2}, {"batch_norm": "local"}),
    "interleaved": (CNN, {"data": 2, "schedule": "interleaved_1f1b"}, {}),
    "pipedream": (CNN, {"data": 2, "schedule": "pipedream"}, {}),
    "compressed": (None, {"data": 2}, {"compression": {"type": "qsgd", "bits": 8}}),
    "sharded and clipped": (None, {"data": 2}, {"exchange": SHARD, "grad_clip": 1.0}),
    "averaged": (None, {"data": 2}, {"exchange": {"type": "averaging", "every": EPOCH}}),
    "averaged every third step": (None, {"data": 2}, {"exchange": {"type": "averaging", "every": 3}}),
    "three that gossip": (None, {"data": 3}, {"exchange": {"type": "gossip"}}),
    "tensor": (None, {"tensor": 2}, {}),
    "tensor and replicas": (None, {"data": 2, "tensor": 2}, {}),
    "alone and clipped": (None, {}, {"grad_clip": 1.0}),
    "alone with norms of layers": (None, {}, {"optimizer": {"type": "lamb", "lr": 0.01}}),
}


def made(name: str) -> ReplicaSettings:
    task, network, keys = CASES[name]
    strategy = {key: keys[key] for key in ("exchange", "compression") if key in keys}
    network = {"pipeline": 2, "microbatches": 4, "split": "equal", **network}
    train = {key: value for key, value in keys.items() if key not in strategy}
    return settings_of({"network": network, **strategy}, task, batch_size=BATCH, drop_last=True, **train)


@pytest.mark.parametrize("name", CASES)
def test_a_step_of_real_workers_sends_what_is_counted_and_what_they_agree_by(name: str) -> None:
    settings = made(name)
    step = pipeline_step([profile(settings)], settings, lambda _: 0.0)
    counted_settings, is_all = countable(settings, step.begins)
    found = count(counted_settings)
    sent = {axis: found.num_bytes(axis) for axis in ("data", "tensor", "model", "world", "pipeline")}
    if not is_all:
        sent["pipeline"] = step.link_bytes * settings.layout.data
    planned = sum(sent.values()) + agreed_bytes(settings, RunLength(0, EPOCH, BATCH))
    num_steps = EPOCH if settings.diverges or settings.is_streaming else 2
    if name == "averaged every third step":
        num_steps *= 3
    few = 10.0 if settings.diverges else 0.1  # they validate by texts of numbers, which differ in length
    assert planned == pytest.approx(bytes_a_step(settings, num_steps), rel=0, abs=few)


@pytest.mark.parametrize("name", ["alone and clipped", "pipedream", "interleaved"])
def test_a_pipeline_holds_what_follows_from_a_dry_run_of_the_whole_model(name: str) -> None:
    settings = made(name)
    step = pipeline_step([profile(settings)], settings, lambda _: 0.0)
    held = _held_bytes(step, dry_run(_whole(settings)))
    assert held == max((worker.held_bytes for worker in count(settings).workers), key=sum)


@pytest.mark.parametrize("name", ["sharded and clipped", "tensor and replicas"])
def test_workers_hold_what_is_counted(name: str) -> None:
    settings = made(name)
    real = replace(settings, pause_at=2, validate_every_steps=10_000)
    hosts = [WatchedHost(real) for _ in range(settings.layout.size)]

    def held(world: Any) -> tuple[int, int, int]:
        Host.run(hosts[world.rank], world)  # type: ignore[arg-type]
        return held_bytes(hosts[world.rank].replica)

    found = run_members(len(hosts), held)
    assert [worker.held_bytes for worker in count(settings).workers] == found[: settings.layout.model_size]


def test_operations_among_replicas_take_the_time_of_the_worker_that_has_most() -> None:
    found = count(made("replicas"))
    assert found.exchange_s(lambda _kind, _size, _num_bytes: 1.0) == 1.0  # one bucket of gradients each
    most = max(step.calls[0][2] for worker in found.workers for step in worker.steps)
    assert found.exchange_s(lambda _kind, _size, num_bytes: float(num_bytes)) == most
