"""Group B: what a batch is, and how it is split."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.trainers.loop.checkpoint_source import Loaded
from orchestray.trainers.loop.replica import Replica
from orchestray.trainers.tasks import resolve
from support.training import (
    Rows,
    State,
    Trained,
    digits,
    furthest,
    order_of,
    regression,
    settings_for,
    state_of,
    stream_of,
    train,
)

PLAIN = {"type": "sgd", "lr": 1.0}
"""With it a single step moves the weights by exactly the gradient."""


def gradient_of(task: Rows, weights: State, rows: np.ndarray) -> State:
    """Return the gradient of the mean loss over these rows, all at once, by autograd alone."""
    model = task.build_model().double()
    model.load_state_dict(weights)
    batch = task.to_batch(task.table.take(rows))
    task.loss(model(batch["inputs"]), batch).backward()  # type: ignore[no-untyped-call]
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


# -- minibatches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [1, 3])
def test_minibatch_sgd_moves_by_the_mean_of_the_per_sample_gradients(data: int) -> None:
    task = regression()
    run = train(task, data, steps=1, batch_size=32, optimizer=PLAIN)[0]
    order = order_of(96, seed=0, epoch=0)
    each = [gradient_of(task, run.before, order[k : k + 1]) for k in range(32)]
    mean = {name: torch.stack([gradient[name] for gradient in each]).mean(0) for name in each[0]}
    assert furthest(run.gradient, mean) <= 1e-12


def test_minibatch_sgd_takes_samples_over_batch_size_times_epochs_steps() -> None:
    run = train(regression(96), 2, epochs=3, batch_size=32)[0]
    assert (len(run.steps), run.outcome.step, run.outcome.epochs) == (9, 9, 3)
    uneven = train(regression(100), 2, epochs=3, batch_size=32)[0]
    assert (len(uneven.steps), uneven.outcome.samples) == (12, 300)  # the last batch of each epoch has four samples


@pytest.mark.parametrize("stop", [2, 5])
def test_replicas_use_each_sample_once_an_epoch_also_over_a_restart_with_another_number_of_them(
    stop: int, tmp_path: Path
) -> None:
    task = regression(100)
    used: list[list[int]] = []

    def watch(replica: Replica, _collective: Collective, _calls: object) -> None:
        own: list[int] = []
        used.append(own)
        backward, record = replica.network.backward, replica.recorder.record

        def noting(share: Any, *rest: Any, **named: Any) -> Any:
            own.extend(int(one) for micro_batch in share.micro_batches for one in micro_batch.sample_ids)
            return backward(share, *rest, **named)

        def stopping(line: dict[str, Any]) -> None:
            record(line)
            replica.stop_requested |= line["step"] == stop  # agreed on in the step that follows

        replica.network.backward = noting  # type: ignore[method-assign]
        replica.recorder.record = stopping  # type: ignore[method-assign]

    with CheckpointWriter(str(tmp_path), keep=2) as writer:
        first = train(task, 3, epochs=2, batch_size=16, checkpoints=writer, prepare=watch)[0]
        writer.wait()
    found, _ = latest_good(str(tmp_path))
    assert found is not None
    assert first.outcome.ended == "interrupted"
    before, used = [one for own in used for one in own], []
    second = train(task, 2, epochs=2, batch_size=16, load=lambda: Loaded(found), prepare=watch)[0]
    after = [one for own in used for one in own]
    assert len(before) == 16 * len(first.steps)
    assert len(before) + len(after) == 200
    assert (len(first.steps) + len(second.steps), second.outcome.epochs) == (14, 2)
    assert Counter(before + after) == dict.fromkeys(range(100), 2)
    assert max(Counter(before).values()) == 1  # none twice in the part of the first epoch


def test_the_checksum_of_a_worker_s_order_is_that_of_its_samples_and_of_the_seed() -> None:
    def checksums(seed: int) -> list[int]:
        outcome = train(regression(100), 2, epochs=2, batch_size=100, seed=seed)[0].outcome
        return [worker["worker"]["order"] for worker in outcome.usage]

    orders = [order_of(100, seed=3, epoch=epoch) for epoch in range(2)]
    halves = [np.concatenate([order[:50] for order in orders]), np.concatenate([order[50:] for order in orders])]
    assert checksums(3) == [crc32(half.tobytes()) for half in halves]
    assert checksums(3) != checksums(4)


def test_batch_gradient_method_has_the_gradient_of_the_whole_data_set() -> None:
    task = regression(96)
    runs = train(task, 3, steps=1, batch_size=96, optimizer=PLAIN)
    whole = gradient_of(task, runs[0].before, np.arange(96))
    assert max(furthest(run.gradient, whole) for run in runs) <= 1e-12
    # Every step is a pass over the data, so a step is an epoch.
    assert train(task, 3, steps=4, batch_size=96)[0].outcome.epochs == 4


# -- gradients and losses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [1, 2])
def test_backpropagation_equals_finite_differences_for_every_weight(data: int) -> None:
    task = regression(16, width=3, depth=3)
    run = train(task, data, steps=1, batch_size=16, optimizer=PLAIN)[0]
    batch = task.to_batch(task.table)

    def loss_at(weights: State) -> float:
        model = task.build_model().double()
        model.load_state_dict(weights)
        with torch.no_grad():
            return float(task.loss(model(batch["inputs"]), batch))

    for name, value in run.before.items():
        for index in np.ndindex(*value.shape):
            losses = []
            for shift in (1e-5, -1e-5):
                moved = {**run.before, name: value.clone()}
                moved[name][index] += shift
                losses.append(loss_at(moved))
            assert run.gradient[name][index].item() == pytest.approx((losses[0] - losses[1]) / 2e-5, abs=1e-8)


def test_softmax_cross_entropy_is_its_formula_with_gradient_softmax_minus_target() -> None:
    rng = np.random.default_rng(0)
    outputs = torch.tensor(rng.normal(size=(8, 10)), requires_grad=True)
    targets = rng.integers(0, 10, size=8)
    loss = digits().loss(outputs, {"targets": torch.tensor(targets)})
    loss.backward()  # type: ignore[no-untyped-call]
    raw = outputs.detach().numpy()
    softmax = np.exp(raw) / np.exp(raw).sum(axis=1, keepdims=True)
    one_hot = np.eye(10)[targets]
    assert loss.item() == pytest.approx(-np.mean(np.sum(one_hot * np.log(softmax), axis=1)), abs=1e-12)
    assert outputs.grad is not None
    np.testing.assert_allclose(outputs.grad.numpy(), (softmax - one_hot) / 8, rtol=0, atol=1e-12)


def test_squared_loss_is_the_mean_square_and_its_gradient_twice_the_error(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pq.write_table(pa.table({"x": rng.normal(size=20), "y": rng.normal(size=20)}), tmp_path / "rows.parquet")
    task = resolve("parquet")(path=str(tmp_path / "rows.parquet"), label="y", kind="regression")
    data = task.dataset("train")
    batch = task.to_batch(data if isinstance(data, pa.Table) else data.to_table())
    model = task.build_model()
    outputs = model(batch["inputs"]).detach().requires_grad_()
    loss = task.loss(outputs, batch)
    loss.backward()
    error = outputs.detach().reshape(-1) - batch["targets"].reshape(-1)
    assert loss.item() == pytest.approx(float((error**2).mean()), rel=1e-6)
    assert outputs.grad is not None
    torch.testing.assert_close(outputs.grad.reshape(-1), 2 * error / len(error))


# -- a batch in pieces -------------------------------------------------------------------------------------------------


def noting_passes(sizes: list[int]) -> Callable[[Replica, Collective, object], None]:
    """Return a function that has the first replica note the samples of each forward pass that learns."""

    def prepare(replica: Replica, collective: Collective, _calls: object) -> None:
        def note(_model: nn.Module, _inputs: object, outputs: Tensor) -> None:
            if outputs.requires_grad:
                sizes.append(len(outputs))

        if collective.rank == 0:
            replica.model.register_forward_hook(note)

    return prepare


@pytest.mark.parametrize("data", [1, 2])
def test_bunch_mode_of_k_samples_equals_a_minibatch_of_k(data: int) -> None:
    task = regression()
    options: dict[str, Any] = {"steps": 20, "batch_size": 8, "optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.9}}
    sizes: list[int] = []
    delayed = train(task, data, accumulate=8 // data, prepare=noting_passes(sizes), **options)[0]
    together = train(task, **options)[0]
    assert sizes == [1] * (20 * 8 // data)  # one sample at a time
    assert furthest(delayed.after, together.after) <= 1e-12
    assert len(delayed.steps) == len(together.steps) == 20


@pytest.mark.parametrize("batch_size", [32, 30])
def test_gradient_accumulation_makes_one_step_of_all_micro_batches(batch_size: int) -> None:
    task = regression()
    options: dict[str, Any] = {"steps": 12, "batch_size": batch_size, "optimizer": {"type": "adam", "lr": 0.01}}
    passes: dict[int, list[int]] = {4: [], 1: []}
    split, whole = (
        train(task, accumulate=pieces, prepare=noting_passes(sizes), **options)[0] for pieces, sizes in passes.items()
    )
    assert [len(sizes) for sizes in passes.values()] == [4 * 12, 12]
    assert sum(passes[4]) == sum(passes[1])
    assert furthest(split.after, whole.after) <= 1e-10
    assert len(split.steps) == 12
    counted = [run.outcome.usage[0]["worker"]["passes"] for run in (split, whole)]
    assert counted == [4 * 12, 12]
    assert [line["loss"] for line in split.steps] == pytest.approx([line["loss"] for line in whole.steps], abs=1e-12)


def test_micro_batching_divides_the_peak_activation_bytes() -> None:
    task = regression(128, depth=6)

    def peak_bytes(accumulate: int) -> tuple[int, State]:
        settings = settings_for(steps=1, batch_size=128, accumulate=accumulate, optimizer=PLAIN)
        replica = Replica(task, settings, stream_of(task, settings))
        replica.connect(SoloCollective())
        replica.run(time.time())
        return replica.meter.peak_bytes, state_of(replica.model)

    whole, after = peak_bytes(1)
    for pieces in (2, 8):
        peak, after_pieces = peak_bytes(pieces)
        assert furthest(after_pieces, after) <= 1e-12
        # The scalars of the loss are what does not shrink.
        assert 0 < whole / pieces <= peak <= whole / pieces + 64


# -- precision ---------------------------------------------------------------------------------------------------------


def test_reduced_precision_large_batches_reach_the_accuracy_of_float32() -> None:
    def trained(precision: str) -> list[Trained]:
        options: dict[str, Any] = {
            "epochs": 10,
            "batch_size": 256,
            "optimizer": {"type": "adam", "lr": 0.01},
            "precision": precision,
        }
        return [train(digits(hidden=[64]), seed=seed, **options)[0] for seed in range(3)]

    def accuracies(runs: list[Trained]) -> np.ndarray:
        return np.array([(run.outcome.final["validation"] or {})["accuracy"] for run in runs])

    full, short = trained("float32"), trained("bfloat16")
    # It does compute in sixteen bits, from the first loss on, while the weights stay whole.
    assert all(a.steps[0]["loss"] != b.steps[0]["loss"] for a, b in zip(full, short, strict=True))
    assert all(value.dtype == torch.float32 for run in short for value in run.after.values())
    wanted, reached = accuracies(full), accuracies(short)
    assert wanted.mean() > 0.9
    assert abs(wanted.mean() - reached.mean()) <= 2 * np.hypot(wanted.std(ddof=1), reached.std(ddof=1))
