"""A dry run sends on paper what real workers send, holds what they hold, and needs nobody."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestray.platform.comm.thread_group import run_members
from orchestray.trainers.planning.dry_run import _connected, _staging, dry_run, profile
from orchestray.trainers.planning.pipelines import pipeline_step
from orchestray.trainers.planning.pricing import sent_bytes
from support.real_steps import Host, bytes_a_step, settings_of

pytestmark = pytest.mark.usefixtures("_few_measured_steps")
_STEPS = 12
SCHEMES: dict[str, dict[str, Any]] = {
    "all-reduce": {"network": {"data": 2}},
    "three replicas": {"network": {"data": 3}},
    "ZeRO-1": {"network": {"data": 2}, "exchange": {"type": "allreduce", "shard": "optimizer"}},
    "ZeRO-2": {"network": {"data": 2}, "exchange": {"type": "allreduce", "shard": "gradients"}},
    "ZeRO-3": {"network": {"data": 2}, "exchange": {"type": "allreduce", "shard": "parameters"}},
    "rabenseifner": {"network": {"data": 4}, "exchange": {"type": "allreduce", "algorithm": "rabenseifner"}},
    "one bit": {"network": {"data": 2}, "compression": {"type": "onebit", "error_feedback": True}},
    "averaged": {"network": {"data": 2}, "exchange": {"type": "averaging", "every": 4}},
    "elastic": {"network": {"data": 2}, "exchange": {"type": "elastic_averaging", "every": 2}},
    "gossip": {"network": {"data": 4}, "exchange": {"type": "gossip"}},
    "tensor": {"network": {"tensor": 2}},
    "data and tensor": {"network": {"data": 2, "tensor": 2}},
}


WHOLE = [(name, kind) for name in ("ZeRO-1", "ZeRO-3") for kind in ("muon", "soap")]
"""Schemes that cut matrices into parts that are alike, and optimizers that move whole ones."""


@pytest.mark.parametrize(("name", "kind"), [*((name, "adam") for name in SCHEMES), *WHOLE])
def test_the_bytes_of_a_step_are_those_of_real_workers(name: str, kind: str) -> None:
    settings = settings_of(SCHEMES[name], optimizer={"type": kind, "lr": 0.01})
    predicted = sum(sent_bytes(dry_run(settings), settings.layout).values())
    few = 0.01 if settings.diverges else 0.0  # diverging workers agree on their losses now and then
    num_steps = _STEPS if settings.diverges else 2
    assert predicted == pytest.approx(bytes_a_step(settings, num_steps), rel=few, abs=0.5)


@pytest.mark.parametrize(("model", "plan"), [("cnn", "spatial"), ("inception", "branches")])
def test_members_of_a_tensor_group_send_to_their_neighbours_or_to_all(model: str, plan: str) -> None:
    task = {"type": "digits", "model": model, "hidden": [4, 6]}
    settings = settings_of({"network": {"tensor": 3, "plan": plan}}, task)
    assert sum(sent_bytes(dry_run(settings), settings.layout).values()) == pytest.approx(bytes_a_step(settings, 2))


@pytest.mark.parametrize("kind", ["qsgd", "onebit"])
def test_a_scheme_is_measured_though_what_others_are_imagined_to_send_would_make_it_diverge(kind: str) -> None:
    groups = ({"match": "*.bias", "lr": 50.0},)
    settings = settings_of(
        {"network": {"data": 4}, "compression": {"type": kind}},
        optimizer={"type": "sgd", "lr": 50.0, "momentum": 0.9, "groups": groups},
    )
    assert dry_run(settings).step_times_s


def test_sharded_parameters_gradients_and_state_are_held_in_parts() -> None:
    whole = dry_run(settings_of(SCHEMES["all-reduce"]))
    shards = {name: dry_run(settings_of(SCHEMES[name])) for name in ("ZeRO-1", "ZeRO-2", "ZeRO-3")}
    num_values = 64 * 32 + 32 + 32 * 32 + 32 + 32 * 10 + 10
    assert whole.parameter_bytes == whole.gradient_bytes == 4 * num_values
    assert whole.optimizer_bytes == pytest.approx(8 * num_values, rel=0.01)
    assert shards["ZeRO-1"].parameter_bytes == shards["ZeRO-2"].parameter_bytes == whole.parameter_bytes
    assert shards["ZeRO-3"].parameter_bytes == pytest.approx(whole.parameter_bytes / 2, rel=0.01)
    for shard in shards.values():
        assert shard.optimizer_bytes == pytest.approx(whole.optimizer_bytes / 2, rel=0.02)
        assert shard.gradient_bytes == pytest.approx(whole.gradient_bytes / 2, rel=0.01)


def test_steps_with_and_without_an_average_are_told_apart_whatever_the_period() -> None:
    strategy = {"network": {"data": 2}, "exchange": {"type": "averaging", "every": 500}}
    found = dry_run(settings_of(strategy))
    assert found.every == 500
    assert found.plain is not None
    assert found.plain.calls == ()
    assert sum(call.num_bytes for call in found.exchanging.calls) == found.parameter_bytes


def test_batches_do_not_grow_in_a_dry_run() -> None:
    growing = {"batch_schedule": {"type": "steps", "every_steps": 2, "factor": 4, "max_batch_size": 192}}
    steady, grown = (dry_run(settings_of(SCHEMES["all-reduce"], **train)) for train in ({}, growing))
    assert grown.activation_bytes == steady.activation_bytes


def test_a_measured_layer_has_the_bytes_of_its_parameters_and_of_a_cut_after_it() -> None:
    found = profile(settings_of({"network": {"pipeline": 2, "microbatches": 4}}))
    assert found.micro_batch_samples == 12
    assert sum(found.parameter_bytes) == 4 * (64 * 32 + 32 + 32 * 32 + 32 + 32 * 10 + 10)
    assert set(found.boundary_bytes[:-1]) == {4 * 12 * 32}
    assert found.boundary_bytes[-1] == 0


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble", "interleaved_1f1b"])
def test_a_pipeline_is_predicted_to_hold_the_activations_that_it_holds(schedule: str) -> None:
    network = {"pipeline": 2, "microbatches": 4, "schedule": schedule, "split": "equal"}  # as times differ
    settings = settings_of({"network": network})
    predicted = pipeline_step([profile(settings)], settings, lambda _: 0.0).activation_bytes
    real = replace(settings, pause_at=2, validate_every_steps=10_000)
    hosts = [Host(real) for _ in range(2)]
    (outcome, _) = run_members(2, lambda world: hosts[world.rank].run(world))
    assert [usage["peak_activation_bytes"] for usage in outcome.usage] == [*predicted]


def test_a_first_worker_has_memory_for_what_it_saves_unless_that_is_saved_piece_by_piece() -> None:
    for name in ("all-reduce", "ZeRO-3"):
        settings = settings_of(SCHEMES[name])
        replica = _connected(settings, [])
        held = sum(each.values.nbytes for each in _staging(replica))
        found = [replica.state().tensors, replica.optimizer.state_tensors()] if settings.is_replicated else []
        assert held == sum(each.nbytes for tensors in found for each in tensors.values())
        assert (held > 0) is (name == "all-reduce")
