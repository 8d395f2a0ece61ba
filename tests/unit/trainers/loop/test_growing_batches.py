"""Batches that grow in real runs: every sample once an epoch, under any number of workers, and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestray.platform.data.endless import Endless
from orchestray.platform.errors import ConfigError
from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.trainers.loop.checkpoint_source import Loaded
from orchestray.trainers.loop.replica import Replica
from support.training import Trained, digits, furthest, regression, same_bits, train

STEPS = {"type": "steps", "every_steps": 3, "factor": 2, "max_batch_size": 40}
MEASURED = {"type": "noise_scale", "every_steps": 2, "max_batch_size": 64}


def sizes_of(run: Trained) -> list[int]:
    return [line["batch_samples"] for line in run.steps]


def test_every_sample_is_used_once_an_epoch_and_epochs_are_validated() -> None:
    seen: list[np.ndarray] = []
    validated: list[int] = []

    def note(replica: Replica, collective: object, calls: object) -> None:
        backward, record = replica.network.backward, replica.recorder.record

        def noting(share: Any, *rest: Any, **named: Any) -> float:
            seen.extend(micro_batch.sample_ids for micro_batch in share.micro_batches)
            return backward(share, *rest, **named)

        def recording(line: dict[str, Any]) -> None:
            record(line)
            if line.get("split") == "validation":
                validated.append(line["step"])

        replica.network.backward = noting  # type: ignore[method-assign]
        replica.recorder.record = recording  # type: ignore[method-assign]

    run = train(regression(100), epochs=3, batch_size=16, batch_schedule=STEPS, prepare=note)[0]
    # 16 x 3, 32, then a batch of the 20 that are left; 32 once more, and 40 from step 6 on.
    assert sizes_of(run) == [16, 16, 16, 32, 20, 32, 40, 28, 40, 40, 20]
    assert (run.outcome.epochs, run.outcome.samples, validated) == (3.0, 300, [5, 8, 11])
    ids = np.concatenate(seen)
    for epoch in range(3):
        assert sorted(ids[100 * epoch : 100 * (epoch + 1)]) == list(range(100))


def test_epochs_between_growths_are_whole() -> None:
    by_epochs = {"type": "steps", "every_epochs": 1, "factor": 2, "max_batch_size": 48}
    run = train(regression(96), epochs=4, batch_size=16, batch_schedule=by_epochs)[0]
    assert sizes_of(run) == [16] * 6 + [32] * 3 + [48] * 2 * 2


@pytest.mark.parametrize("schedule", [STEPS, MEASURED], ids=["steps", "noise_scale"])
def test_any_number_of_workers_is_the_single_process(schedule: dict[str, Any]) -> None:
    options: dict[str, Any] = {"steps": 14, "batch_size": 16, "batch_schedule": schedule}
    runs = [train(regression(), data, accumulate=4 // data, **options)[0] for data in (1, 2, 4)]
    assert max(sizes_of(runs[0])) > 16
    for run in runs[1:]:
        assert sizes_of(run) == sizes_of(runs[0])
        assert furthest(run.after, runs[0].after) <= 1e-12


@pytest.mark.parametrize("exchange", [{"shard": "gradients"}, {"type": "averaging", "every": 1}])
def test_steps_grow_batches_under_other_exchanges(exchange: dict[str, Any]) -> None:
    options: dict[str, Any] = {"steps": 10, "batch_size": 16, "batch_schedule": STEPS}
    alone, shared = train(regression(), **options)[0], train(regression(), 2, exchange=exchange, **options)[0]
    assert sizes_of(shared) == sizes_of(alone)
    assert shared.outcome.samples == alone.outcome.samples


@pytest.mark.parametrize("schedule", [STEPS, MEASURED], ids=["steps", "noise_scale"])
@pytest.mark.parametrize("stop", [3, 5])
def test_a_resumed_run_has_the_batches_and_bits_of_one_that_was_not_stopped(
    schedule: dict[str, Any], stop: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"steps": 14, "batch_size": 16, "accumulate": 2, "batch_schedule": schedule}
    whole = train(regression(), **options)[0]

    def stopping(replica: Replica, collective: object, calls: object) -> None:
        record = replica.recorder.record

        def recording(line: dict[str, Any]) -> None:
            record(line)
            replica.stop_requested |= line["step"] == stop  # agreed on in the step that follows

        replica.recorder.record = recording  # type: ignore[method-assign]

    with CheckpointWriter(str(tmp_path), keep=2) as writer:
        first = train(regression(), checkpoints=writer, prepare=stopping, **options)[0]
        writer.wait()
    found, _ = latest_good(str(tmp_path))
    assert found is not None
    second = train(regression(), load=lambda: Loaded(found), **options)[0]
    assert first.outcome.ended == "interrupted"
    assert len(set(sizes_of(whole))) > 1
    assert sizes_of(first) + sizes_of(second) == sizes_of(whole)
    keys = ("noise_scale", "critical_batch")
    assert [[line.get(key) for key in keys] for line in first.steps + second.steps] == [
        [line.get(key) for key in keys] for line in whole.steps
    ]
    assert same_bits(second.after, whole.after)


def test_the_variance_of_the_gradient_is_kept_under_the_level() -> None:
    """Batch size to control gradient variance, second half: without growth it stays above the level."""
    options: dict[str, Any] = {
        "batch_size": 16,
        "accumulate": 4,
        "steps": 120,
        "optimizer": {"type": "sgd", "lr": 0.02},
    }
    level, task = 0.02, digits()
    kept = {"type": "variance", "level": level, "every_steps": 5, "max_batch_size": 1024}
    steady, grown = (train(task, **options, **more)[0] for more in ({"noise_scale": {}}, {"batch_schedule": kept}))
    assert min(line["gradient_variance"] for line in steady.steps[20:]) > level
    # From the first look on, but for the samples that are left at the end of an epoch.
    whole = [line for line in grown.steps if line["batch_samples"] == max(sizes_of(grown))]
    assert 16 < max(sizes_of(grown)) < 1024
    assert {line["step"] for line in whole} >= {6, 7, 8, 9, 10}
    assert len(whole) > 80
    assert max(line["gradient_variance"] for line in whole) <= level


def test_data_with_an_order_of_their_own_are_refused() -> None:
    rows = regression()
    rows.dataset = lambda split: Endless(lambda: iter([rows.table])) if split == "train" else rows.table  # type: ignore[method-assign, assignment, return-value, arg-type]
    with pytest.raises(ConfigError, match=r"made for batches of one size; take it out"):
        train(rows, steps=5, batch_schedule=STEPS, batch_size=16)
