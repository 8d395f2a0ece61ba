"""Workers that change the same memory without a lock, against plain SGD; what is left of one that dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.errors import ClusterError, ConfigError, TrainingError
from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.trainers.central import hogwild
from orchestray.trainers.central.hogwild import HogwildWorker, Updater
from orchestray.trainers.central.hogwild_server import OrderingMachine
from orchestray.trainers.central.ledger import Ledger
from orchestray.trainers.central.plan import LedgerSettings
from orchestray.trainers.central.shared_values import JOURNAL, Marks, Shape, SharedValues
from orchestray.trainers.checkpoint_source import Loaded
from orchestray.trainers.optimizers import make_optimizer
from support.central_run import CentralRun, central_settings, train_central
from support.layouts import layout_settings, train_laid_out
from support.training import Rows, digits, furthest, same_bits

SHARED = {"consistency": "asynchronous", "transport": "shared_memory"}
SGD = {"type": "sgd", "lr": 0.1}
ADAM = {"type": "adam", "lr": 0.01}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def task() -> Any:
    return digits(hidden=[24, 16])


def network_task() -> Any:
    return digits(model="cnn", hidden=[4, 6])


def hogwild_run(directory: Path, data: int = 1, make: Any = task, checkpoint: Any = None, **train: Any) -> CentralRun:
    return train_central(make, central_settings(data, SHARED, **train), directory, checkpoint=checkpoint)


# -- one worker is plain SGD -------------------------------------------------------------------------------------------


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
    assert found.outcome.told == {"updates": 6, "lost_updates": 0}


@pytest.mark.parametrize(
    "train",
    [{"grad_clip": 0.5}, {"lr_schedule": {"type": "cosine", "warmup_steps": 2}}],
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


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=str)
def test_an_epoch_of_two_workers_uses_every_sample_once_and_learns(optimizer: dict[str, Any], tmp_path: Path) -> None:
    found = hogwild_run(tmp_path, 2, steps=None, epochs=2, batch_size=16, optimizer=optimizer)
    assert found.outcome.samples == 2 * len(task().dataset("train"))
    assert found.lines[-1]["accuracy"] > 0.6
    num_shares = sum(worker["shares"] for worker in found.workers)
    assert sum(found.outcome.staleness.values()) == found.outcome.told["updates"] == num_shares
    assert 0 <= found.outcome.told["lost_updates"] < 0.01 * num_shares


class Ones(Rows):
    """The gradient of each sample is 1 for each of the weights, whatever they are."""

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
    lost = found.outcome.told["updates"] - moved
    assert torch.equal(lost, lost.round())
    assert found.outcome.told["updates"] == 120
    assert bool((lost >= 0).all())
    assert int(lost.max()) <= 6


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


# -- sparse gradients --------------------------------------------------------------------------------------------------


def sparse_gradient(rows: list[int], width: int, num_rows: int, seed: int = 0) -> Tensor:
    values = torch.randn(len(rows), width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, (num_rows, width), check_invariants=True)


def updater(parameters: list[Tensor], optimizer: dict[str, Any] | None = None, **options: Any) -> Updater:
    rule = make_optimizer(**(optimizer or {"type": "sgd"}))
    rule.init((str(index), parameter) for index, parameter in enumerate(parameters))
    return Updater(parameters, rule, **{"by_rows": optimizer is None, "grad_clip": None, **options})


def test_a_sparse_update_touches_its_rows_alone_and_adds_up_rows_that_come_twice() -> None:
    table = torch.randn(10, 3, dtype=torch.float64)
    untouched = [row for row in range(10) if row not in (2, 5, 7)]
    expected = table.clone()
    gradient = sparse_gradient([7, 2, 7, 5], 3, 10)
    expected.add_(gradient, alpha=-0.1)
    # Were other rows written, even with what they held, NaN would not be where it was put.
    table[untouched] = float("nan")
    writes = WritesTo(table)
    updater([table]).apply([gradient], 0.1)
    assert torch.equal(table[[2, 5, 7]], expected[[2, 5, 7]])
    assert writes.rows() == {2, 5, 7}


class WritesTo:
    """Which rows of a table have changed."""

    def __init__(self, table: Tensor) -> None:
        self._table, self._before = table, table.clone().view(torch.int64)

    def rows(self) -> set[int]:
        changed = (self._table.view(torch.int64) != self._before).any(dim=1)
        return set(changed.nonzero().flatten().tolist())


def test_rows_that_others_change_while_a_sparse_update_is_made_keep_what_they_got() -> None:
    table, reference = torch.zeros(8, 2, dtype=torch.float64), torch.zeros(8, 2, dtype=torch.float64)
    mine, theirs = sparse_gradient([1, 3], 2, 8, seed=1), sparse_gradient([3, 6], 2, 8, seed=2)
    for gradient in (mine, theirs):
        reference.add_(gradient, alpha=-1.0)
        updater([table]).apply([gradient], 1.0)
    assert torch.equal(table, reference)


@pytest.mark.parametrize("optimizer", [{"type": "sgd", "momentum": 0.9}, {"type": "adam"}], ids=str)
def test_under_a_rule_with_state_a_sparse_gradient_moves_as_the_dense_one(optimizer: dict[str, Any]) -> None:
    tables = [torch.ones(6, 2, dtype=torch.float64) for _ in range(2)]
    sparse, dense = (updater([table], optimizer) for table in tables)
    for seed in range(3):
        gradient = sparse_gradient([seed, 4], 2, 6, seed)
        sparse.apply([gradient], 0.1)
        dense.apply([gradient.to_dense()], 0.1)
    assert torch.equal(*tables)


def test_sparse_and_dense_gradients_are_clipped_by_their_joint_norm() -> None:
    table, other = torch.zeros(5, 2, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    gradient, beside = sparse_gradient([0, 3, 0], 2, 5), torch.full((3,), 2.0, dtype=torch.float64)
    whole = torch.cat([gradient.to_dense().reshape(-1), beside])
    scale = 0.5 / (float(whole.norm()) + 1e-6)
    updater([table, other], grad_clip=1.0).apply([gradient, beside.clone()], 1.0, weight=0.5)
    assert torch.allclose(torch.cat([table.reshape(-1), other]), -whole * scale, rtol=0, atol=1e-12)


class Words(Rows):
    """Classes of short texts: the mean of the words' vectors, of which a text has a few."""

    def __init__(self, sparse: bool = True) -> None:
        generator = torch.Generator().manual_seed(3)
        words = torch.randint(0, 50, (240, 4), generator=generator)
        targets = (words < 25).sum(1) > 2

        def model() -> nn.Module:
            return nn.Sequential(nn.EmbeddingBag(50, 6, sparse=sparse), nn.Linear(6, 2))

        super().__init__(words.double().numpy(), targets.long().numpy(), model)

    def to_batch(self, columns: Any) -> dict[str, Tensor]:
        batch = super().to_batch(columns)
        return {**batch, "inputs": batch["inputs"].long()}


@pytest.mark.parametrize("train", [{}, {"grad_clip": 0.1}], ids=str)
def test_one_worker_with_sparse_gradients_is_the_single_process_with_dense_ones(
    train: dict[str, Any], tmp_path: Path
) -> None:
    chosen = {"steps": 25, "optimizer": {"type": "sgd", "lr": 2.0}, **train}
    one = train_laid_out(lambda: Words(sparse=False), layout_settings(**chosen))
    assert furthest(hogwild_run(tmp_path, make=Words, **chosen).weights, one.weights) <= 1e-12


def test_two_workers_with_sparse_gradients_learn(tmp_path: Path) -> None:
    found = hogwild_run(tmp_path, 2, make=Words, steps=None, epochs=15, optimizer={"type": "sgd", "lr": 4.0})
    assert found.lines[-1]["accuracy"] > 0.9


# -- a worker that dies ------------------------------------------------------------------------------------------------


class KilledError(Exception):
    """In place of SIGKILL, in a thread."""


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
    assert len(begun) == found.outcome.told["updates"] == 80
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


# -- the memory --------------------------------------------------------------------------------------------------------


def shape(**changed: Any) -> Shape:
    parameters = (("weight", (3, 2)), ("bias", (3,)))
    return replace(Shape(parameters, torch.float64, num_workers=2), **changed)


def test_what_one_process_writes_another_one_reads_and_nothing_is_left_of_a_killed_one() -> None:
    program = (
        "import sys, time, torch\n"
        "from orchestray.trainers.central.shared_values import SharedValues, Shape\n"
        "shared = SharedValues.create(Shape((('weight', (3, 2)), ('bias', (3,))), torch.float64, 2))\n"
        "shared.values.copy_(torch.arange(9.0))\n"
        "print(shared.address, flush=True)\n"
        "sys.stdin.readline()\n"
        "print(float(shared.values[4]), flush=True)\n"
        "sys.stdin.readline()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        address = other.stdout.readline()
        shared = SharedValues.attach(address, shape())
        assert shared.values.tolist() == list(range(9))
        assert [view.shape for view in shared.views(shared.values)] == [(3, 2), (3,)]
        shared.values[4] = 40.0
        print(file=other.stdin, flush=True)
        assert other.stdout.readline() == "40.0\n"
        other.kill()
        other.wait()
        assert float(shared.values[4]) == 40.0  # who has mapped it goes on
        with pytest.raises(ClusterError, match="cannot be opened"):
            SharedValues.attach(address, shape())


def test_attaching_says_what_is_wrong() -> None:
    shared = SharedValues.create(shape())
    address = json.loads(shared.address)
    with pytest.raises(ClusterError, match="on one node"):
        SharedValues.attach(json.dumps({**address, "machine": "another"}), shape())
    with pytest.raises(TrainingError, match="another model"):
        SharedValues.attach(shared.address, shape(parameters=(("weight", (300, 2)),)))
    with pytest.raises(ClusterError, match="another is in its place"):
        SharedValues.attach(json.dumps({**address, "token": "00"}), shape())
    shared.close()
    with pytest.raises(ClusterError):
        SharedValues.attach(json.dumps(address), shape())


def test_every_region_lies_at_a_multiple_of_its_size() -> None:
    slots = ("step", "exp_avg")
    shared = SharedValues.create(shape(num_floats=3, num_integers=1, slots=slots, dtype=torch.float32))
    tensors = [shared.values, shared.buffers.floats, shared.buffers.integers, shared.counter]
    assert [tensor.numel() for tensor in tensors] == [9, 3, 1, 1]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
    assert shared.marks.shape == (2, 8)
    shared.close()


def test_the_state_of_two_optimizers_is_the_same_memory() -> None:
    slots = {"slots": ("step", "exp_avg", "exp_avg_sq")}
    shared = SharedValues.create(shape(**slots))
    rules = [make_optimizer("adam") for _ in range(2)]
    views = shared.views(shared.values)
    for rule, fill in zip(rules, (True, False), strict=True):
        rule.init(zip(("weight", "bias"), views, strict=True))
        shared.share_state(rule, ("weight", "bias"), fill=fill)
    gradients = [torch.ones_like(view) for view in views]
    rules[0].step(views, gradients, 0.1)
    state = rules[1].state_tensors()
    assert float(state["weight.step"]) == 1.0
    assert state["bias.exp_avg"].tolist() == pytest.approx([0.1] * 3)
    rules[1].step(views, gradients, 0.1)
    alone, values = make_optimizer("adam"), [torch.zeros_like(view) for view in views]
    alone.init(zip(("weight", "bias"), values, strict=True))
    for _ in range(2):
        alone.step(values, gradients, 0.1)
    assert all(torch.equal(*pair) for pair in zip(views, values, strict=True))
    shared.close()


def test_the_journal_keeps_the_last_updates_of_each_worker_and_none_that_has_not_begun() -> None:
    shared = SharedValues.create(shape())
    assert shared.left_by(1) == []
    marks = Marks(shared, 1)
    for number in range(JOURNAL + 5):
        marks.begin(number, number / 2, number, number + 1)
        marks.end()
    kept = shared.left_by(1)
    assert kept == [[number, number / 2, number, number + 1] for number in range(6, JOURNAL + 5)]
    assert shared.left_by(0) == []
    # The next one's entry is written, and its worker killed before it has begun.
    shared.journal[1, (JOURNAL + 5) % JOURNAL] = 99, 99, 99
    assert shared.left_by(1) == kept
    assert shared.version() == JOURNAL + 5
    Marks(shared, 1).begin(70, 0.0, 0, 0)
    assert shared.told() == {"updates": JOURNAL + 6, "lost_updates": 1}
    assert shared.version() == JOURNAL + 5
    Marks(shared, 1)  # whoever comes after it
    assert shared.version() == JOURNAL + 6
    shared.close()


# -- orders ahead of need ----------------------------------------------------------------------------------------------


def test_several_orders_come_at_once_and_never_one_that_others_have_to_wait_for() -> None:
    plan = LedgerSettings(
        num_samples=64, num_validation_samples=1, batch_size=4, num_shares=2, consistency="asynchronous",
        lookahead=16, epochs=2,
    )  # fmt: skip
    machine = OrderingMachine.__new__(OrderingMachine)
    machine.ledger = ledger = Ledger(plan)
    asked = {"holding": [], "wait": True, "more": 9}
    ledger.join(0)
    answer = OrderingMachine.apply(machine, {"worker": 0, "next": asked})
    orders = [answer["order"], *answer["more"]]
    assert [(order["step"], order["share"]) for order in orders] == [(1 + n // 2, n % 2) for n in range(10)]
    ledger.join(1)
    sizes, worker = list[int](), 0
    while orders[0]["kind"] == "compute":
        for order in orders:
            ledger.acknowledge(worker, order["order_id"], 1.0, read_version=0, write_version=0)
        worker = 1 - worker
        answer = OrderingMachine.apply(machine, {"worker": worker, "next": asked})
        orders = [answer["order"], *answer.get("more", ())]
        sizes.append(len(orders))
    # 22 shares are left of the epoch: fewer and fewer at a time, so that both end at about the same time.
    assert sum(sizes) == 22 + 1
    assert sizes[0] == 1 + 20 // 4
    assert sizes == sorted(sizes, reverse=True)
    assert orders[0]["kind"] == "validate"


def test_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="gpus_per_worker"):
        HogwildWorker(task(), central_settings(1, SHARED), device="cuda")


def test_threads_of_a_process_map_the_memory_apart() -> None:
    shared = SharedValues.create(shape())
    again = SharedValues.attach(shared.address, shape())
    again.values[3] = 3.0
    assert again.values.data_ptr() != shared.values.data_ptr()
    assert float(shared.values[3]) == 3.0
    shared.close()
    assert os.getpid() == json.loads(again.address)["process"]
