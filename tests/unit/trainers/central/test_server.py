"""Workers under parameter servers, as threads: what comes out is what one process would have come to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.central import Plan, Servers, Worker, run_all, train_central, train_plain

torch.set_num_threads(1)

OPTIMIZERS: list[dict[str, Any]] = [
    {"type": "sgd", "momentum": 0.9},
    {"type": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    {"type": "adam"},
    {"type": "adamw"},
    {"type": "adagrad"},
    {"type": "rmsprop", "momentum": 0.5},
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: "-".join(str(v) for v in o.values()))
@pytest.mark.parametrize("shards", [1, 3])
def test_a_synchronous_parameter_server_is_the_single_process(shards: int, optimizer: dict[str, Any]) -> None:
    schedule = {"type": "cosine", "warmup_steps": 2}
    plan = Plan("synchronous", num_workers=3, shards=shards, optimizer=optimizer, schedule=schedule)
    values, losses, _ = train_central(plan)
    wanted, wanted_losses, _ = train_plain(plan)
    assert float((values - wanted).abs().max()) <= 1e-12
    assert losses == pytest.approx(wanted_losses, rel=0, abs=1e-12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: "-".join(str(v) for v in o.values()))
def test_an_asynchronous_server_with_one_worker_is_plain_training_bit_for_bit(optimizer: dict[str, Any]) -> None:
    plan = Plan("asynchronous", optimizer=optimizer)
    values, losses, workers = train_central(plan)
    wanted, wanted_losses, _ = train_plain(plan)
    assert torch.equal(values, wanted)
    assert losses == wanted_losses
    assert {result.staleness for result in workers[0].results} == {0}


@pytest.mark.parametrize("consistency", ["asynchronous", "synchronous", "stale"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: "-".join(str(v) for v in o.values()))
def test_many_shards_are_one_shard_bit_for_bit(consistency: str, optimizer: dict[str, Any]) -> None:
    one, *others = (train_central(Plan(consistency, shards=shards, optimizer=optimizer))[0] for shards in (1, 2, 5))
    assert all(torch.equal(one, other) for other in others)


def test_stale_training_with_a_bound_of_zero_is_the_single_process() -> None:
    plan = Plan("stale", staleness=0, num_workers=3, shards=2)
    values, losses, _ = train_central(plan)
    wanted, wanted_losses, _ = train_plain(plan)
    assert float((values - wanted).abs().max()) <= 1e-12
    assert losses == pytest.approx(wanted_losses, rel=0, abs=1e-12)


def test_every_sample_of_every_epoch_is_used_once_whatever_the_consistency() -> None:
    for consistency in ("asynchronous", "stale", "synchronous"):
        plan = Plan(consistency, staleness=1, num_workers=3, shards=2, steps=8)
        _, _, workers = train_central(plan)
        pieces = sorted((o.epoch, *piece) for worker in workers for o in worker.applied for piece in o.pieces)
        positions = [(epoch, position) for epoch, start, stop in pieces for position in range(start, stop)]
        assert positions == [(epoch, position) for epoch in (0, 1) for position in range(40)]
