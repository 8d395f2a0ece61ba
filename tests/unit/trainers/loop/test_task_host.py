"""The last short batch of an epoch, where a run leaves it out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestray.platform.errors import DataError
from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.trainers.loop.checkpoint_source import Loaded
from orchestray.trainers.loop.task_host import TaskHost
from support.central_run import central_settings, train_central
from support.layouts import LaidOut, layout_settings, train_laid_out
from support.plain import train_plainly
from support.training import Rows, furthest, regression, same_bits

STEPS = 5
CONFIG: dict[str, Any] = {"batch_size": 12, "drop_last": True}
"""An epoch of 29 samples then has two batches, and five of the samples are not used in it."""


def task() -> Rows:
    return regression(num_samples=29)


def trained(network: Any = None, exchange: Any = None, **train: Any) -> LaidOut:
    return train_laid_out(task, layout_settings(network, exchange, **{"steps": STEPS, **CONFIG, **train}))


@pytest.mark.parametrize(
    ("network", "exchange"),
    [({}, {}), ({"data": 3}, {}), ({"data": 2}, {"shard": "gradients"}), ({"pipeline": 2}, {})],
)
def test_a_run_without_short_batches_is_plain_pytorch_without_them(network: Any, exchange: Any) -> None:
    right = train_plainly(task(), steps=STEPS, **CONFIG)
    found = trained(network, exchange)
    assert found.losses == pytest.approx(right.losses, rel=0, abs=1e-12)
    assert furthest(found.weights, right.weights) <= 1e-12
    assert (found.outcome.samples, found.outcome.epochs) == (STEPS * 12, STEPS / 2)
    whole = train_plainly(task(), steps=STEPS, batch_size=12)
    assert found.losses[:2] == pytest.approx(whole.losses[:2], rel=0, abs=1e-12), "the order of samples is the same"
    assert found.losses[2] != pytest.approx(whole.losses[2], rel=0, abs=1e-3)


def test_epochs_are_counted_in_whole_batches_and_validated_after_them() -> None:
    found = trained(steps=None, epochs=2)
    assert (found.outcome.step, found.outcome.epochs) == (4, 2)
    assert len(found.losses) == 4
    assert found.outcome.final["validation"] is not None


def test_parameter_servers_plan_no_short_batch(tmp_path: Path) -> None:
    right = train_plainly(task(), steps=4, **CONFIG)
    found = train_central(task, central_settings(2, {"shards": 2}, **CONFIG, steps=None, epochs=2), tmp_path)
    assert found.losses == pytest.approx(right.losses, rel=0, abs=1e-12)
    assert furthest(found.weights, right.weights) <= 1e-12
    assert (found.outcome.step, found.outcome.epochs) == (4, 2)


def test_a_run_resumes_in_the_middle_of_an_epoch_without_short_batches(tmp_path: Path) -> None:
    settings = layout_settings(steps=3, **CONFIG)
    train_laid_out(task, settings, checkpoints=lambda: CheckpointWriter(tmp_path, keep=2))
    found, _ = latest_good(tmp_path)
    assert found is not None
    again = train_laid_out(task, layout_settings(steps=STEPS, **CONFIG), load=lambda: Loaded(found))
    assert same_bits(again.weights, trained().weights)


def test_validation_uses_every_sample_and_too_few_samples_are_refused() -> None:
    host = TaskHost(layout_settings(steps=1, batch_size=1000, drop_last=True))
    assert host._stream("validation", 0, 1).num_samples % 1000
    assert host._stream("train", 0, 1).num_samples == 1000
    host = TaskHost(layout_settings(steps=1, batch_size=2000, drop_last=True))
    with pytest.raises(DataError, match=r"fewer than one batch of 2000 \(train\.batch_size\), and train\.drop_last"):
        host._stream("train", 0, 1)
