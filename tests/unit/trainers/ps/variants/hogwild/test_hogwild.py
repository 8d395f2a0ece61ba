"""Workers that change the same memory without a lock, against plain SGD; what is left of one that dies."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.errors import ConfigError
from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.trainers.loop.checkpoint_source import Loaded
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.ps.coordinator.coordinator import Coordinator
from orchestray.trainers.ps.protocol.assignments import Compute, Validate
from orchestray.trainers.ps.protocol.plan import CoordinatorSettings
from orchestray.trainers.ps.protocol.requests import Answer, Asking, Entry, Header
from orchestray.trainers.ps.variants.hogwild import hogwild
from orchestray.trainers.ps.variants.hogwild.hogwild import HogwildWorker, Updater
from orchestray.trainers.ps.variants.hogwild.server import OrderingMachine
from orchestray.trainers.ps.variants.hogwild.shared_values import Marks, Shape, SharedValues
from support.central_run import central_settings, train_central
from support.hogwild_runs import ADAM, SGD, SHARED, hogwild_run, network_task, shape, task
from support.layouts import layout_settings, train_laid_out
from support.training import Rows, furthest, same_bits

# -- one worker is plain SGD -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_of_any_precision_are_updated(dtype: torch.dtype) -> None:
    parameter = torch.ones(20, dtype=dtype)
    rule = make_optimizer("sgd")
    rule.init([("weight", parameter)])
    updater = Updater([parameter], rule, by_rows=True, grad_clip=None)
    updater.apply([torch.ones(20, dtype=dtype)], 0.5)
    assert torch.equal(parameter, torch.full((20,), 0.5, dtype=dtype))


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD,
        {"type": "sgd", "lr": 0.05, "momentum": 0.9, "nesterov": True},
        ADAM,
        {"type": "adagrad", "lr": 0.05},
        {"type": "lars", "lr": 1.0},
    ],
    ids=str,
)
def test_one_worker_is_the_single_process_bit_for_bit(optimizer: dict[str, Any], tmp_path: Path) -> None:
    one = train_laid_out(task, layout_settings(steps=6, optimizer=optimizer))
    found = hogwild_run(tmp_path, steps=6, optimizer=optimizer)
    assert same_bits(found.weights, one.weights)
    assert found.losses == one.losses
    assert found.outcome.staleness == {0: 6}
    assert found.outcome.summary == {"updates": 6, "lost_updates": 0}


@pytest.mark.parametrize(
    "train",
    [{"grad_clip": 0.05}, {"lr_schedule": {"type": "cosine", "warmup_steps": 2}}],
    ids=str,
)
def test_one_worker_is_the_single_process_whatever_the_step_is(train: dict[str, Any], tmp_path: Path) -> None:
    one = train_laid_out(task, layout_settings(steps=6, **train))
    assert furthest(hogwild_run(tmp_path, steps=6, **train).weights, one.weights) <= 1e-12


def test_running_statistics_of_one_worker_are_those_of_the_single_process(tmp_path: Path) -> None:
    one = train_laid_out(network_task, layout_settings(steps=4, batch_norm="local"))
    found = hogwild_run(tmp_path, make=network_task, steps=4, batch_norm="local")
    assert furthest(found.weights, one.weights) <= 1e-12


# -- several workers ---------------------------------------------------------------------------------------------------


def test_an_epoch_of_two_workers_uses_every_sample_once_and_learns(tmp_path: Path) -> None:
    found = hogwild_run(tmp_path, 2, steps=None, epochs=2, batch_size=16, optimizer=ADAM)
    assert found.outcome.samples == 2 * len(task().dataset("train"))
    assert found.lines[-1]["accuracy"] > 0.4  # of ten classes; which update comes first is not fixed
    num_shares = sum(worker["shares"] for worker in found.workers)
    assert sum(found.outcome.staleness.values()) == found.outcome.summary["updates"] == num_shares
    assert 0 <= found.outcome.summary["lost_updates"] < 0.01 * num_shares


class Ones(Rows):
    """A task whose gradient of each sample is 1 for each of the weights, whatever they are."""

    def __init__(self) -> None:
        super().__init__(torch.ones(96, 4).numpy(), torch.zeros(96).numpy(), lambda: nn.Linear(4, 1, bias=False))

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return outputs.mean()

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {}


def test_all_that_two_workers_apply_is_in_the_weights_but_for_the_writes_that_were_lost(tmp_path: Path) -> None:
    settings = central_settings(2, SHARED, steps=60, batch_size=16, optimizer={"type": "sgd", "lr": 0.5})
    before = hogwild.SharedValues.attach
    starts: list[Tensor] = []

    def attach(address: str, shape: Shape) -> SharedValues:
        shared = before(address, shape)
        starts.append(shared.values.clone())
        return shared

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hogwild.SharedValues, "attach", attach)
        found = train_central(Ones, settings, tmp_path)
    # Halves and quarters: sums of them are exact. A share moves each weight by 0.5 * 8 / 16 against its gradient of 1.
    moved = (starts[0] - found.weights["weight"].reshape(-1)) / 0.25
    lost = found.outcome.summary["updates"] - moved
    assert torch.equal(lost, lost.round())
    assert found.outcome.summary["updates"] == 120
    assert bool((lost >= 0).all())
    assert int(lost.max()) <= 6


def test_a_share_that_comes_late_is_applied_at_the_rate_of_the_newest_step(tmp_path: Path) -> None:
    schedule = {"type": "step", "every_steps": 5, "gamma": 0.5}
    settings = central_settings(1, SHARED, steps=6, optimizer={"type": "sgd", "lr": 0.5}, lr_schedule=schedule)
    before = hogwild.SharedValues.attach
    starts: list[Tensor] = []

    def attach(address: str, shape: Shape) -> SharedValues:
        shared = before(address, shape)
        shared.steps[0] = 6  # as if another process of this worker had gone on
        starts.append(shared.values.clone())
        return shared

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hogwild.SharedValues, "attach", attach)
        found = train_central(Ones, settings, tmp_path)
    assert (starts[0] - found.weights["weight"].reshape(-1)).tolist() == pytest.approx([6 * 0.25] * 4, rel=1e-9)


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [{**SGD, "momentum": 0.9}, ADAM], ids=str)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(optimizer: dict[str, Any], tmp_path: Path) -> None:
    whole = hogwild_run(tmp_path / "whole", steps=7, optimizer=optimizer)
    storage = str(tmp_path / "checkpoints")
    settings = central_settings(1, SHARED, steps=4, optimizer=optimizer)
    saved = replace(settings, checkpoint_storage=storage, checkpoint_every_steps=4)
    train_central(task, saved, tmp_path / "first")
    checkpoint = latest_good(storage)[0]
    assert checkpoint is not None
    again = hogwild_run(tmp_path / "second", steps=7, optimizer=optimizer, checkpoint=checkpoint)
    assert same_bits(again.weights, whole.weights)
    assert again.losses == whole.losses[4:]


def test_a_checkpoint_goes_on_in_lock_step_and_the_other_way_round(tmp_path: Path) -> None:
    whole = train_laid_out(task, layout_settings(steps=6, optimizer=ADAM))
    storage = str(tmp_path / "shared")
    first = central_settings(1, SHARED, steps=3, optimizer=ADAM)
    train_central(task, replace(first, checkpoint_storage=storage, checkpoint_every_steps=3), tmp_path / "first")
    found = latest_good(storage)[0]
    assert found is not None
    lock_step = layout_settings({"data": 2}, steps=6, optimizer=ADAM)
    assert furthest(train_laid_out(task, lock_step, load=lambda: Loaded(found)).weights, whole.weights) <= 1e-12
    other = tmp_path / "lock-step"
    train_laid_out(task, replace(lock_step, steps=3), checkpoints=lambda: CheckpointWriter(other, keep=1))
    again = hogwild_run(tmp_path / "second", steps=6, optimizer=ADAM, checkpoint=latest_good(other)[0])
    assert furthest(again.weights, whole.weights) <= 1e-12


# -- a worker that dies ------------------------------------------------------------------------------------------------


class KilledError(Exception):
    """A substitute for SIGKILL, in a thread."""


@pytest.mark.parametrize("moment", ["before its update", "in the middle of it", "after it"])
def test_of_a_worker_that_dies_every_share_is_done_once(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = list[int](), list[int]()
    killed = list[int]()

    class Dying(Marks):
        def __init__(self, shared: SharedValues, worker: int) -> None:
            super().__init__(shared, worker)
            self._worker = worker

        def begin(self, order_id: int, loss_sum: float, read_version: int, write_version: int) -> None:
            dies = self._worker == 1 and len(begun) >= 12 and not killed
            if dies and moment == "before its update":
                killed.append(order_id)
                raise KilledError
            super().begin(order_id, loss_sum, read_version, write_version)
            begun.append(order_id)
            if dies and moment == "in the middle of it":
                killed.append(order_id)
                raise KilledError

        def end(self) -> None:
            super().end()
            ended.append(begun[-1])
            if moment == "after it" and self._worker == 1 and len(begun) >= 12 and not killed:
                killed.append(begun[-1])
                raise KilledError

    monkeypatch.setattr(hogwild, "Marks", Dying)
    found = train_central(task, central_settings(2, SHARED, steps=40), tmp_path, replaces=KilledError)
    assert len(killed) == 1
    assert max(Counter(begun).values()) == 1
    assert len(begun) == found.outcome.summary["updates"] == 80
    assert len(ended) == 80 - (moment == "in the middle of it")
    assert found.outcome.step == 40
    assert found.outcome.samples == 40 * 24


def test_a_worker_that_was_given_up_begins_no_more_updates() -> None:
    shared = SharedValues.create(shape())
    marks = Marks(shared, 1)
    assert not marks.is_expelled
    shared.expel(0)
    assert not marks.is_expelled
    shared.expel(1)
    assert marks.is_expelled
    assert not Marks(shared, 1).is_expelled
    shared.close()


# -- orders ahead of need ----------------------------------------------------------------------------------------------


def received(answer: Answer) -> list[Any]:
    """Return the orders that an answer brings, by way of its bytes."""
    told = Header.decode(Answer, Header(answer).encode()).sections
    return [told.order, *told.more]


def test_several_orders_come_at_once_and_never_one_that_others_have_to_wait_for() -> None:
    plan = CoordinatorSettings(
        num_samples=64, num_validation_samples=1, batch_size=4, num_shares=2, consistency="asynchronous",
        lookahead=16, epochs=2,
    )  # fmt: skip
    machine = OrderingMachine.__new__(OrderingMachine)
    machine.coordinator = coordinator = Coordinator(plan)
    asked = Asking((), wait=True, more=9)
    coordinator.join(0)
    answer = OrderingMachine.apply(machine, Entry(worker=0, next=asked))
    orders = received(answer)
    assert [(order.step, order.share) for order in orders] == [(1 + n // 2, n % 2) for n in range(10)]
    coordinator.join(1)
    sizes, worker = list[int](), 0
    while isinstance(orders[0], Compute):
        for order in orders:
            coordinator.acknowledge(worker, order.order_id, 1.0, read_version=0, write_version=0)
        worker = 1 - worker
        answer = OrderingMachine.apply(machine, Entry(worker=worker, next=asked))
        orders = received(answer)
        sizes.append(len(orders))
    # 22 shares are left of the epoch: fewer and fewer at a time, so that both end at about the same time.
    assert sum(sizes) == 22 + 1
    assert sizes[0] == 1 + 20 // 4
    assert sizes == sorted(sizes, reverse=True)
    assert isinstance(orders[0], Validate)


def test_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="gpus_per_worker"):
        HogwildWorker(task(), central_settings(1, SHARED), device="cuda")
