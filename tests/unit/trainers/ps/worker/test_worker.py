"""Whole runs under parameter servers, against the single process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from orchestray.platform.errors import OrchestrayError
from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.trainers.loop.checkpoint_source import Loaded
from support.central_run import (
    CentralRun,
    central_settings,
    train_central,
    train_through_a_loss_of_all_servers,
    train_with_a_lost_worker,
)
from support.layouts import layout_settings, train_laid_out
from support.other_rows import Divided, turned
from support.training import digits, few_digits, furthest, same_bits

ADAM = {"type": "adam", "lr": 0.01}
MOMENTUM = {"type": "sgd", "lr": 0.1, "momentum": 0.9}


def task() -> Any:
    return few_digits()


@pytest.mark.parametrize(
    ("data", "exchange", "optimizer"),
    [
        (1, {}, ADAM),
        (2, {}, MOMENTUM),
        (3, {"shards": 2}, ADAM),
        (3, {"shards": 2}, MOMENTUM),
        (2, {"consistency": "stale", "staleness": 0}, ADAM),
        (3, {"backup_workers": 1}, MOMENTUM),
    ],
    ids=["one worker", "two", "two shards", "two shards, momentum", "stale by nothing", "a backup worker"],
)
def test_synchronous_servers_are_the_single_process(
    data: int, exchange: dict[str, Any], optimizer: dict[str, Any], tmp_path: Path
) -> None:
    one = train_laid_out(task, layout_settings(steps=6, optimizer=optimizer))
    found = train_central(task, central_settings(data, exchange, steps=6, optimizer=optimizer), tmp_path)
    assert found.losses == pytest.approx(one.losses, rel=0, abs=1e-12)
    assert furthest(found.weights, one.weights) <= 1e-12
    assert found.outcome.ended == "finished"


def test_one_asynchronous_worker_is_plain_sgd_bit_for_bit(tmp_path: Path) -> None:
    one = train_laid_out(task, layout_settings(steps=8))
    found = train_central(task, central_settings(1, {"consistency": "asynchronous"}, steps=8), tmp_path)
    assert same_bits(found.weights, one.weights)
    assert found.losses == one.losses


def test_several_shards_are_one_bit_for_bit(tmp_path: Path) -> None:
    found = [
        train_central(task, central_settings(2, {"shards": shards}, steps=5, optimizer=ADAM), tmp_path / str(shards))
        for shards in (1, 3)
    ]
    assert same_bits(found[0].weights, found[1].weights)


@pytest.mark.parametrize(
    ("data", "exchange"),
    [(1, {"consistency": "asynchronous"}), (2, {}), (2, {"shards": 2})],
    ids=["asynchronous", "synchronous", "two shards"],
)
def test_workers_that_fetch_what_has_changed_train_to_the_same_bits_with_fewer_bytes(
    data: int, exchange: dict[str, Any], tmp_path: Path
) -> None:
    found = []
    for pulls in ("whole", "changed"):
        settings = central_settings(data, {**exchange, "pulls": pulls}, steps=8, optimizer={"type": "sgd", "lr": 0.3})
        # What each of two workers keeps depends on who computes which share.
        settings = replace(settings, compression={"type": "topk", "ratio": 0.01, "error_feedback": data == 1})
        found.append(train_central(task, settings, tmp_path / pulls))
    whole, changed = found
    assert same_bits(whole.weights, changed.weights)
    assert whole.losses == changed.losses
    assert sum(changed.moved) < 0.5 * sum(whole.moved)


@pytest.mark.parametrize("staleness", [1, 3])
def test_staleness_never_exceeds_its_bound(staleness: int, tmp_path: Path) -> None:
    faults = ({"kind": "slow", "role": "worker", "rank": 2, "at_step": 1, "factor": 10.0},)
    settings = central_settings(3, {"consistency": "stale", "staleness": staleness}, steps=15)
    found = train_central(task, replace(settings, faults=faults), tmp_path)
    assert 1 <= max(found.outcome.staleness) <= staleness
    assert sum(found.outcome.staleness.values()) == 3 * 15


# Under plain SGD a worker that does not fetch moves its own parameters.
@pytest.mark.parametrize(
    ("exchange", "optimizer"),
    [
        ({"push_every": 3, "shards": 2}, ADAM),
        ({"fetch_every": 3}, {"type": "sgd", "lr": 0.3}),
        ({"push_every": 2, "fetch_every": 2}, ADAM),
        ({"overlap": True}, ADAM),
    ],
    ids=str,
)
def test_an_asynchronous_epoch_uses_every_sample_once_and_learns(
    exchange: dict[str, Any], optimizer: dict[str, Any], tmp_path: Path
) -> None:
    chosen = {"consistency": "asynchronous", **exchange}
    settings = central_settings(2, chosen, steps=None, epochs=3, batch_size=48, optimizer=optimizer)
    found = train_central(task, settings, tmp_path)
    assert found.outcome.samples == 3 * len(task().dataset("train"))
    assert found.lines[-1]["accuracy"] > 0.4  # of ten classes; which update comes first is not fixed
    assert sum(found.outcome.staleness.values()) == sum(worker["shares"] for worker in found.workers)


@pytest.mark.parametrize("exchange", [{}, {"shards": 2}], ids=str)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(exchange: dict[str, Any], tmp_path: Path) -> None:
    settings = central_settings(2, exchange, steps=7, optimizer=ADAM)
    whole = train_central(task, settings, tmp_path / "whole")
    storage = str(tmp_path / "checkpoints")
    saved = replace(settings, steps=4, checkpoint_storage=storage, checkpoint_every_steps=4)
    train_central(task, saved, tmp_path / "first")
    checkpoint = latest_good(storage)[0]
    assert checkpoint is not None
    again = train_central(task, settings, tmp_path / "second", checkpoint=checkpoint)
    assert same_bits(again.weights, whole.weights)
    assert again.losses == whole.losses[4:]


def test_a_checkpoint_of_servers_goes_on_in_lock_step_and_the_other_way_round(tmp_path: Path) -> None:
    whole = train_laid_out(task, layout_settings(steps=6, optimizer=ADAM))
    storage = str(tmp_path / "servers")
    first = central_settings(2, {"shards": 2}, steps=3, optimizer=ADAM)
    train_central(task, replace(first, checkpoint_storage=storage, checkpoint_every_steps=3), tmp_path / "first")
    found = latest_good(storage)[0]
    assert found is not None
    lock_step = layout_settings({"data": 2}, steps=6, optimizer=ADAM)
    assert furthest(train_laid_out(task, lock_step, load=lambda: Loaded(found)).weights, whole.weights) <= 1e-12
    other = tmp_path / "lock-step"
    train_laid_out(task, replace(lock_step, steps=3), checkpoints=lambda: CheckpointWriter(other, keep=1))
    again = train_central(
        task, central_settings(3, steps=6, optimizer=ADAM), tmp_path / "second", checkpoint=latest_good(other)[0]
    )
    assert furthest(again.weights, whole.weights) <= 1e-12


def test_running_statistics_are_kept_by_the_lead(tmp_path: Path) -> None:
    def network() -> Any:
        return digits(model="cnn", hidden=[4, 6])

    one = train_laid_out(network, layout_settings(steps=4, batch_norm="local"))
    found = train_central(network, central_settings(1, steps=4, batch_norm="local"), tmp_path)
    assert furthest(found.weights, one.weights) <= 1e-12


def test_compressed_gradients_are_fewer_bytes(tmp_path: Path) -> None:
    settings = replace(
        central_settings(2, {"consistency": "asynchronous"}, steps=20, precision="float32"),
        compression={"type": "onebit", "error_feedback": True},
    )
    found = train_central(task, settings, tmp_path)
    assert all(worker["saved_bytes"] > 0 for worker in found.workers if worker["shares"])
    assert mean(found.losses[-5:]) < mean(found.losses[:5])


def test_a_run_ends_when_its_goal_is_reached(tmp_path: Path) -> None:
    settings = central_settings(2, steps=40, validate_every_steps=10, until={"metric": "loss", "value": 100.0})
    found = train_central(task, settings, tmp_path)
    assert (found.outcome.ended, found.outcome.step) == ("until", 10)


@pytest.mark.parametrize(("shards", "after_lines"), [(1, 4), (2, 1), (2, 9)])
def test_a_worker_that_is_lost_and_replaced_changes_no_weight(shards: int, after_lines: int, tmp_path: Path) -> None:
    one = train_laid_out(task, layout_settings(steps=30))
    settings = central_settings(2, {"shards": shards}, steps=30)
    found = train_with_a_lost_worker(task, settings, tmp_path, after_lines=after_lines)
    assert found.losses == pytest.approx(one.losses, rel=0, abs=1e-12)
    assert furthest(found.weights, one.weights) <= 1e-12


@pytest.mark.parametrize("shards", [1, 2])
def test_servers_that_all_die_go_on_from_the_last_acknowledged_update(shards: int, tmp_path: Path) -> None:
    one = train_laid_out(task, layout_settings(steps=30))
    settings = central_settings(2, {"shards": shards, "persist": True}, steps=30)
    found = train_through_a_loss_of_all_servers(task, settings, tmp_path, after_lines=7)
    assert found.outcome.samples == 30 * 24
    assert [line["step"] for line in found.lines if "split" not in line] == list(range(1, 31))
    assert found.losses == pytest.approx(one.losses, rel=0, abs=1e-12)
    assert furthest(found.weights, one.weights) <= 1e-12


ATTACKED: dict[str, Any] = {"steps": 2, "batch_size": 40}
ATTACK = {"kind": "byzantine", "role": "worker", "rank": 1, "at_step": 1, "attack": "sign_flip"}
FAULTS = ({**ATTACK, "scale": 1000.0},)  # with 100 it was 9 times what Krum loses by the choice of another share


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> CentralRun:
    """Train under attack with the mean of the gradients: what each rule is to be far from."""
    return train_central(task, replace(central_settings(5, **ATTACKED), faults=FAULTS), tmp_path_factory.mktemp("mean"))


RULES = [{"type": "median", "byzantine": 1}, {"type": "krum", "byzantine": 1}]  # value by value, and whole gradients


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["type"])
def test_a_rule_at_the_server_is_the_rule_of_lock_step_replicas_under_attack(
    rule: dict[str, Any], spoilt: CentralRun, tmp_path: Path
) -> None:
    lock_step = replace(layout_settings({"data": 5}, **ATTACKED), aggregation=rule)
    expected = train_laid_out(task, lock_step)
    found = train_central(task, replace(central_settings(5, **ATTACKED), aggregation=rule), tmp_path / "honest")
    assert furthest(found.weights, expected.weights) <= 1e-12
    held = replace(central_settings(5, **ATTACKED), aggregation=rule, faults=FAULTS)
    withstood = train_central(task, held, tmp_path / "withstood")
    assert furthest(withstood.weights, expected.weights) < 0.1 * furthest(spoilt.weights, expected.weights)


@pytest.mark.parametrize(
    ("data", "exchange"),
    [
        (2, {"shards": 2}),
        (3, {"consistency": "asynchronous", "push_every": 2}),
        (2, {"transport": "shared_memory", "consistency": "asynchronous"}),
        (2, {"groups": 2}),
    ],
    ids=["two shards", "asynchronous", "shared memory", "a leaf server for each"],
)
def test_workers_with_other_rows_are_refused(data: int, exchange: dict[str, Any], tmp_path: Path) -> None:
    settings = central_settings(data, exchange, steps=4, optimizer=MOMENTUM)
    with pytest.raises(
        OrchestrayError, match=r"Workers \d and \d have not the same train data: as many rows, but others"
    ):
        train_central(lambda: Divided(turned), settings, tmp_path)
